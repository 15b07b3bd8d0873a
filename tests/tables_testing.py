"""Writes tables as files, and prepares them in the test's process, without waiting for the disk."""

import csv
import json
import os
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from inline_engine import InlineEngine as Inline
from pyarrow import feather, orc

from dlrm.data.schema.schema import Schema
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.files import find_tables
from dlrm.preproc.errors import TaskError
from dlrm.preproc.splits import SplitConfig
from dlrm.preproc.tables.options import TableOptions
from dlrm.preproc.tables.prepare_tables import prepare_tables


def write_stream(table, path, rows):
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, rows)


COLUMNAR = {  # suffix: the name of a group of rows, and a writer of groups
    ".parquet": ("row group", lambda t, path, rows: pq.write_table(t, path, row_group_size=rows)),
    ".orc": (
        "stripe",
        lambda t, path, rows: orc.write_table(t, path, batch_size=rows, stripe_size=1),
    ),
    ".arrow": (
        "record batch",
        lambda t, path, rows: feather.write_feather(t, path, chunksize=rows),
    ),
    ".arrows": ("record batch", write_stream),
}


def texts(column):
    """Returns a column as text of CSV, as the csv module writes it."""
    return [
        "" if v is None else "|".join(map(str, v)) if type(v) is list else str(v) for v in column
    ]


def rows_of(table):
    return [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]


def csv_module(table, path):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(table)
        writer.writerows(zip(*map(texts, table.values()), strict=True))


def json_module(table, path):
    with open(path, "w") as file:
        file.writelines(json.dumps(row, default=_of_json) + "\n" for row in rows_of(table))


def _of_json(value):
    return value.item() if isinstance(value, np.integer) else str(value)


def write_table(table, path, rows=2):
    """Writes columns of Python values as the kind of file of the suffix, in groups of rows."""
    if path.suffix in COLUMNAR:
        COLUMNAR[path.suffix][1](pa.table(table), path, rows)
    else:
        {".csv": csv_module, ".jsonl": json_module}[path.suffix](table, path)
    return path


def prepare(
    schema, inputs, output, engine=None, others=(), replace=False, restart=False, **options
):
    """Prepares files by a schema's facts and options; returns the printed lines.

    Args:
        schema: maps and lists, as in a file.
        inputs: files or folders, of training rows if there are `others`.
        others: split -> files.
        options: fields of the division, of CSV and of the rest, by name.
    """
    tables = {"train": find_tables(inputs)}
    tables |= {split: find_tables(files) for split, files in dict(others).items()}
    division = {k: options.pop(k) for k in list(options) if k in SplitConfig.__dataclass_fields__}
    text = {k: options.pop(k) for k in list(options) if k in TextFormat.__dataclass_fields__}
    made = TableOptions(
        Schema.from_dict(schema),
        SplitConfig(**division),
        TextFormat(**text),
        **({"report": False} | options),
    )
    said: list[str] = []
    with patch.object(os, "fsync"):
        prepare_tables(
            made,
            tables,
            Path(output),
            lambda folder: nullcontext(engine or Inline()),
            replace,
            restart,
            said.append,
        )
    return said


def check_bad_row(schema, path, where, problem, output, **options):
    """Checks that the one bad row of four is named, and that quarantine leaves it out.

    Args:
        where, problem: its place, and a part of what is said about it.
        options: those of `prepare`.

    Returns:
        The message.
    """
    with pytest.raises((ValueError, TaskError)) as failed:
        prepare(schema, [path], output, **options)
    assert not output.exists()
    message = str(failed.value)
    aside = {"bad_lines": "quarantine", "max_bad_lines": 0.25, "restart": True}
    prepare(schema, [path], output, **aside, **options)
    (found,) = contents(output / "quarantine").values()
    for text in (message, found.decode()):
        assert text.startswith(where)
        assert problem in text
    assert "\n" not in message
    assert message.endswith("; --bad_lines quarantine leaves such rows out")
    assert found.count(b"\n") == 1
    assert (output / "train" / "label.bin").stat().st_size == 3
    return message


def contents(folder, suffix=""):
    """Returns the bytes of files below a folder with the suffix, by relative name."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(Path(folder).rglob(f"*{suffix}"))
        if path.is_file()
    }
