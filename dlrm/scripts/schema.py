"""Drafts a schema from tables: dlrm schema --input FILES --label COLUMN

    dlrm schema --input sales.parquet --label bought --output schema.yaml
    dlrm prepare --schema schema.yaml --input sales.parquet --output dataset

Input is files of tables, or directories of them, of the kinds that `--input_format` lists; the
first rows are read. The schema has a comment with observations for every column; edit it where it
is wrong. `dlrm.data.tables.draft.draft` documents the rules.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dlrm.command_line import flags_of, free_name, shell_line
from dlrm.data.sources.text_format import TextFormat
from dlrm.documents import one_line
from dlrm.files import write_atomically
from dlrm.flags import ConfigFlags, Values, run_command
from dlrm.scripts.common.table_flags import FilesConfig, text_format
from dlrm.settings import REQUIRED, setting

if TYPE_CHECKING:
    from dlrm.data.schema.schema import Schema
    from dlrm.data.tables.draft import Draft

_CROSS_BUCKETS = 100_000
_SAME = ("input_format", "columns", "header")  # flags that the next command takes unchanged
_MOST_NOTES = 10


@dataclass(frozen=True)
class DraftConfig:
    """The tables, and the roles of their columns; field names are those of the flags."""

    input: tuple[str, ...] = setting(REQUIRED, "files, or directories of files", uri="read")
    label: str = setting(REQUIRED, "column of the label")
    output: Path = setting(Path("schema.yaml"), "file to write", uri="write")
    positive: str | None = setting(
        None,
        "label that counts as 1, or several with commas between them; default: of two labels, the "
        "affirmative or the rarer one",
    )
    weight: str | None = setting(None, "column of sample weights")
    groups: tuple[str, ...] = setting((), "columns to group metrics by, such as the user")
    time: str | None = setting(None, "column of the time; default: the first one found")
    cross: tuple[str, ...] = setting(
        (),
        f"FIELDS or FIELDS:BUCKETS, such as user,item:100000: a cross of categorical fields; "
        f"default: {_CROSS_BUCKETS} buckets",
        repeated=True,
    )
    rows: int = setting(1_000_000, "maximum rows to read", least=1)
    overwrite: bool = setting(False, "replace an earlier file")


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    line = ConfigFlags([("Schema", DraftConfig), ("Files", FilesConfig), ("Files", TextFormat)])
    return run_command(line, _draft, __doc__, arguments)


def _draft(values: Values) -> None:
    from dlrm.data.tables.draft import draft
    from dlrm.data.tables.files import find_tables
    from dlrm.data.tables.formats.text import Text
    from dlrm.data.tables.samples import Seen, batches_of
    from dlrm.data.tables.sniff import sniff

    own = values.config(DraftConfig)
    if own.output.exists() and not own.overwrite:
        raise FileExistsError(f"{own.output}: exists; --overwrite replaces it")
    lines: list[str] = []
    files = find_tables(own.input, values["input_format"], lines.append)
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
    lines += notes[:_MOST_NOTES]
    for path, (number, first) in seen.skipped.items():
        rows = f"{number:,} row{'s' * (number > 1)} that cannot be read"
        lines.append(f"warning:     {path}: skipped {rows}; the first: {first}")
    lines += [f"format:      {line}"] if line is not None else []
    for line in (*lines, *_lines_of(drafted, own)):
        print(one_line(line))
    command = ["dlrm", "prepare", f"--schema={own.output}", f"--input={','.join(own.input)}"]
    command += flags_of({name: values[name] for name in _SAME if name in values.given})
    command += ["--bad_lines=quarantine"] * bool(seen.skipped)
    command.append(f"--output={free_name('dataset')}")
    print(f"  {shell_line(command)}")


def with_crosses(schema: "Schema", cross: Sequence[str]) -> "Schema":
    """Returns a schema with the crosses of `--cross`.

    Raises:
        ValueError: the flag has another form, or a field of it cannot be crossed.
    """
    from dlrm.data.schema.fields import Cross

    crosses = []
    for text in cross:
        names, _, buckets = text.rpartition(":")
        if not buckets.strip().isdecimal():  # a name may have a colon
            names, buckets = text, ""
        fields = tuple(name.strip() for name in names.split(","))
        crosses.append(Cross(fields, buckets=int(buckets or _CROSS_BUCKETS)))
    return replace(schema, crosses=tuple(crosses))


def _lines_of(drafted: "Draft", own: DraftConfig) -> Iterator[str]:
    """Yields what the draft made of the columns."""
    from dlrm.data.tables.fields import shown_name

    schema = drafted.schema
    yield f"label:       {shown_name(schema.label.column)}, {drafted.label}"
    yield f"numerical:   {len(schema.numerical)}"
    yield f"categorical: {len(schema.categorical)}"
    if schema.crosses:
        yield f"crosses:     {', '.join(shown_name(cross.column) for cross in schema.crosses)}"
    if schema.time is not None:
        name = shown_name(schema.time.column)
        yield f"time:        {name}; prepare tests on the rows after --test_from=TIME, if given"
    markers = {field.column: field.missing_values for field in schema.numerical}
    markers |= {field.column: field.missing_values for field in schema.categorical}
    for column, texts in markers.items():
        if texts:
            yield f"missing:     {', '.join(map(repr, texts))} in {shown_name(column)}"
    if drafted.in_doubt:
        names = ", ".join(map(shown_name, drafted.in_doubt))
        yield f"in doubt:    {names}: a number and an id each"
    for column, why in drafted.left_out.items():
        yield f"left out:    {shown_name(column)}, {why}"
    for column, why in drafted.warnings.items():
        yield f"warning:     {shown_name(column)} {why}"
    yield f"{own.output}: drafted from {drafted.sample}; check it, then run"


if __name__ == "__main__":
    sys.exit(main())
