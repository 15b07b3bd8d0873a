"""Drafts a schema from tables: python -m dlrm.scripts.schema --input FILES --label COLUMN

    python -m dlrm.scripts.schema --input sales.parquet --label bought --output schema.yaml
    python -m dlrm.scripts.prepare --schema schema.yaml --input sales.parquet --output dataset

Input is files of tables, or directories of them, of the kinds that `--input_format` lists; the
first rows are read. The schema has a comment with observations for every column; edit it where it
is wrong. `dlrm.data.tables.draft.draft` documents the rules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from absl import flags

from dlrm.command_line import shell_line
from dlrm.data.tables.draft import SAMPLE_ROWS, Draft, draft
from dlrm.data.tables.fields import listed, shown_name
from dlrm.data.tables.files import find_tables
from dlrm.data.tables.kinds.text import Text
from dlrm.data.tables.samples import Seen, batches_of
from dlrm.data.tables.sniff import sniff
from dlrm.data.transform.derived import Cross, Encoding
from dlrm.data.transform.schema import CategoricalField, Schema
from dlrm.documents import brief, one_line
from dlrm.scripts.common import table_flags
from dlrm.scripts.common.command import no_arguments, run_command
from dlrm.scripts.common.table_flags import define_text_flags, text_format

FLAGS = flags.FLAGS
CROSS_BUCKETS = 100_000
_SAME = ("input_format", "columns", "header")  # flags that the next command takes unchanged
_MOST_NOTES = 10


def define_flags() -> None:
    flags.DEFINE_list("input", None, "files, or directories of files", required=True)
    flags.DEFINE_string("label", None, "column of the label", required=True)
    flags.DEFINE_string("output", "schema.yaml", "file to write")
    flags.DEFINE_string(
        "positive",
        None,
        "label that counts as 1, or several with commas between them; default: of two labels, the "
        "affirmative or the rarer one",
    )
    flags.DEFINE_string("weight", None, "column of sample weights")
    flags.DEFINE_list("groups", [], "columns to group metrics by, such as the user")
    flags.DEFINE_string("time", None, "column of the time; default: the first one found")
    flags.DEFINE_multi_string(
        "encode",
        [],
        "KINDS:FIELDS, such as count,target:user,item: encodings of categorical fields",
    )
    flags.DEFINE_multi_string(
        "cross",
        [],
        f"FIELDS or FIELDS:BUCKETS, such as user,item:100000: a cross of categorical fields; "
        f"default: {CROSS_BUCKETS} buckets",
    )
    flags.DEFINE_integer("rows", SAMPLE_ROWS, "maximum rows to read", lower_bound=1)
    flags.DEFINE_boolean("overwrite", False, "replace an earlier file")
    define_text_flags()
    flags.adopt_module_key_flags(table_flags)  # for --help


def main(argv: list[str]) -> int | None:
    no_arguments(argv)
    output = Path(FLAGS.output)
    if output.exists() and not FLAGS.overwrite:
        raise FileExistsError(f"{output}: exists; --overwrite replaces it")
    files = find_tables(FLAGS.input, FLAGS.input_format, _say)
    text, line = sniff(files, text_format())
    roles = [FLAGS.label, FLAGS.weight, FLAGS.time, *FLAGS.groups]
    seen = Seen()
    drafted = draft(
        batches_of(files, text, [name for name in roles if name is not None], seen),
        FLAGS.label,
        positive=FLAGS.positive,
        weight=FLAGS.weight,
        groups=FLAGS.groups,
        time=FLAGS.time,
        max_rows=FLAGS.rows,
        text=text if isinstance(files[0].kind, Text) else None,
        seen=seen,
    )
    drafted = replace(drafted, schema=with_derived(drafted.schema, FLAGS.encode, FLAGS.cross))
    drafted.save(output, ", ".join(FLAGS.input))
    notes = [note for path, spans in seen.spans.items() if (note := spans.note(path, text))]
    for note in notes[:_MOST_NOTES]:
        _say(note)
    if line is not None:
        _say(f"format:      {line}")
    _report(drafted, output)
    return None


def _say(line: str) -> None:
    print(one_line(line))


def with_derived(schema: Schema, encode: Sequence[str], cross: Sequence[str]) -> Schema:
    """Returns a schema with the encodings and crosses of `--encode` and `--cross`.

    Raises:
        ValueError: a flag has another form, or a field of it cannot be encoded or crossed.
    """
    fields = {field.column: field for field in schema.categorical}
    for text in encode:
        kinds, colon, names = (part.strip() for part in text.partition(":"))
        if not colon:
            raise ValueError(f"--encode {text}: expected KINDS:FIELDS, such as target:user,item")
        for name in _categorical("encode", text, names, fields):
            encodings = tuple(map(Encoding, _listed(kinds)))
            field = fields[name]
            fields[name] = replace(field, encodings=field.encodings + encodings)
    crosses = []
    for text in cross:
        names, _, buckets = text.partition(":")
        if buckets and not buckets.strip().isdecimal():
            raise ValueError(f"--cross {text}: expected FIELDS or FIELDS:BUCKETS, got {buckets!r}")
        of = tuple(_categorical("cross", text, names, fields))
        crosses.append(Cross(of, buckets=int(buckets or CROSS_BUCKETS)))
    return replace(schema, categorical=tuple(fields.values()), crosses=tuple(crosses))


def _categorical(
    flag: str, text: str, names: str, fields: Mapping[str, CategoricalField]
) -> list[str]:
    for name in (found := _listed(names)):
        if name not in fields:
            raise ValueError(
                f"--{flag} {text}: expected categorical fields among {', '.join(fields)}, got "
                f"{brief(name)}"
            )
    return found


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _report(drafted: Draft, output: Path) -> None:
    schema = drafted.schema
    _say(f"label:       {shown_name(schema.label.column)}, {drafted.label}")
    print(f"numerical:   {len(schema.numerical)}")
    print(f"categorical: {len(schema.categorical)}")
    if schema.crosses:
        print(f"crosses:     {listed([cross.column for cross in schema.crosses])}")
    if encoded := schema.numerical_names[len(schema.numerical) :]:
        print(f"encodings:   {listed(encoded)}")
    if schema.time is not None:
        print(f"time:        {shown_name(schema.time.column)}")
    markers = {field.column: field.missing_values for field in schema.numerical}
    markers |= {field.column: field.missing_values for field in schema.categorical}
    for name, texts in markers.items():
        if texts:
            print(f"missing:     {', '.join(map(repr, texts))} in {shown_name(name)}")
    if drafted.in_doubt:
        print(f"in doubt:    {listed(drafted.in_doubt)}: a number and an id each")
    for name, why in drafted.left_out.items():
        _say(f"left out:    {shown_name(name)}, {why}")
    for name, why in drafted.leaks.items():
        _say(f"warning:     {shown_name(name)} {why}: is it known before the label?")
    _say(f"{output}: drafted from {drafted.sample}; check it, then run")
    command = ["python", "-m", "dlrm.scripts.prepare", f"--schema={output}"]
    command += [f"--input={','.join(FLAGS.input)}"]
    command += [FLAGS[name].serialize() for name in _SAME if FLAGS[name].present]
    print(f"  {shell_line([*command, '--output=dataset'])}")


if __name__ == "__main__":
    define_flags()
    run_command(main)
