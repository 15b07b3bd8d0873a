"""Drafts a schema from tables."""

from collections.abc import Sequence
from dataclasses import replace

from dlrm.command_line import flags_of, free_name, shell_line
from dlrm.data.schema.fields import Cross
from dlrm.data.schema.schema import Schema
from dlrm.data.tables.draft import Draft, draft
from dlrm.data.tables.fields import shown_name
from dlrm.data.tables.files import find_tables
from dlrm.data.tables.formats.text import Text
from dlrm.data.tables.samples import Seen, batches_of
from dlrm.data.tables.sniff import sniff
from dlrm.documents import one_line
from dlrm.files import write_atomically
from dlrm.flags import Values
from dlrm.scripts.common.table_flags import text_format
from dlrm.scripts.schema.flags import CROSS_BUCKETS, DraftConfig

_SAME = ("input_format", "columns", "header")  # flags that the next command takes unchanged
_MOST_NOTES = 10


def run(values: Values) -> None:
    own = values.config(DraftConfig)
    if own.output.exists() and not own.overwrite:
        raise FileExistsError(f"{own.output}: exists; --overwrite replaces it")
    files = find_tables(own.input, values["input_format"], _say)
    text, line = sniff(files, text_format(values))
    roles = [own.label, own.weight, own.time, *own.groups]
    seen = Seen()
    drafted = draft(
        batches_of(files, text, [name for name in roles if name is not None], seen),
        own.label,
        positive=own.positive,
        weight=own.weight,
        groups=own.groups,
        time=own.time,
        max_rows=own.rows,
        text=text if isinstance(files[0].format, Text) else None,
        seen=seen,
    )
    drafted.schema = with_crosses(drafted.schema, own.cross)
    write_atomically(own.output, drafted.text(", ".join(own.input)))
    notes = [note for path, spans in seen.spans.items() if (note := spans.note(path, text))]
    for note in notes[:_MOST_NOTES]:
        _say(note)
    for path, (number, first) in seen.skipped.items():
        rows = f"{number:,} row{'s' * (number > 1)} that cannot be read"
        _say(f"warning:     {path}: skipped {rows}; the first: {first}")
    if line is not None:
        _say(f"format:      {line}")
    _report(drafted, values, bool(seen.skipped))


def _say(line: str) -> None:
    print(one_line(line))


def with_crosses(schema: Schema, cross: Sequence[str]) -> Schema:
    """Returns a schema with the crosses of `--cross`.

    Raises:
        ValueError: the flag has another form, or a field of it cannot be crossed.
    """
    crosses = []
    for text in cross:
        names, _, buckets = text.rpartition(":")
        if not buckets.strip().isdecimal():  # a name may have a colon
            names, buckets = text, ""
        fields = tuple(name.strip() for name in names.split(","))
        crosses.append(Cross(fields, buckets=int(buckets or CROSS_BUCKETS)))
    return replace(schema, crosses=tuple(crosses))


def _report(drafted: Draft, values: Values, quarantine: bool) -> None:
    schema = drafted.schema
    _say(f"label:       {shown_name(schema.label.column)}, {drafted.label}")
    _say(f"numerical:   {len(schema.numerical)}")
    _say(f"categorical: {len(schema.categorical)}")
    if schema.crosses:
        _say(f"crosses:     {', '.join(shown_name(cross.column) for cross in schema.crosses)}")
    if schema.time is not None:
        name = shown_name(schema.time.column)
        _say(f"time:        {name}; prepare tests on the rows after --test_from=TIME, if given")
    markers = {field.column: field.missing_values for field in schema.numerical}
    markers |= {field.column: field.missing_values for field in schema.categorical}
    for name, texts in markers.items():
        if texts:
            _say(f"missing:     {', '.join(map(repr, texts))} in {shown_name(name)}")
    if drafted.in_doubt:
        names = ", ".join(map(shown_name, drafted.in_doubt))
        _say(f"in doubt:    {names}: a number and an id each")
    for name, why in drafted.left_out.items():
        _say(f"left out:    {shown_name(name)}, {why}")
    for name, why in drafted.warnings.items():
        _say(f"warning:     {shown_name(name)} {why}")
    _say(f"{values['output']}: drafted from {drafted.sample}; check it, then run")
    command = ["dlrm", "prepare", f"--schema={values['output']}"]
    command += [f"--input={','.join(values['input'])}"]
    command += flags_of({name: values[name] for name in _SAME if name in values.given})
    command += ["--bad_lines=quarantine"] * quarantine
    command.append(f"--output={free_name('dataset')}")
    print(f"  {shell_line(command)}")
