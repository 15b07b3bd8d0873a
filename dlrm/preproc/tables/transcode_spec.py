"""NVIDIA's feature specifications of CSV: the schema that they give, and the rows of a split."""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv

from dlrm.data.clicks.feature_spec import CHANNELS, is_list_of_text, read_sections
from dlrm.data.names import SPLITS
from dlrm.data.schema.schema import Schema
from dlrm.documents import brief
from dlrm.files import within
from dlrm.preproc.tables.preset import plain_schema

Chunk = dict[str, Any]  # has the features of some files


def read_csv_spec(path: Path) -> tuple[Schema, dict[str, list[Chunk]]]:
    """Returns the schema of a specification, and the chunks of each split.

    Raises:
        FileNotFoundError, ValueError: it is missing, or it breaks a rule.
    """

    def check(valid: bool, where: str, expected: str, got: Any) -> None:
        if not valid:
            raise ValueError(f"{path}: {where}: expected {expected}, got {brief(got)}")

    sections = read_sections(path)
    channels, splits, sizes = sections["channel_spec"], sections["source_spec"], {}
    valid = set(channels) == set(CHANNELS) and all(map(is_list_of_text, channels.values()))
    valid = valid and len(channels["label"]) == 1
    check(valid, "channel_spec", "categorical, numerical and label, with one label", channels)
    valid = {"train", "test"} <= set(splits) <= set(SPLITS)
    check(valid, "source_spec", "the splits train and test, and possibly validation", [*splits])
    for split, chunks in splits.items():
        where, columns = f"source_spec {split}", []
        for chunk in chunks if isinstance(chunks, list) else [chunks]:
            known = chunk if isinstance(chunk, dict) else {}
            valid = is_list_of_text(known.get("features")) and is_list_of_text(known.get("files"))
            valid = valid and known.get("type") == "csv"
            check(valid, where, "chunks of type csv with features and files", chunk)
            for name in chunk["files"]:
                within(path.parent, name, path, allow_links=False)
            columns += chunk["features"]
        for name in chain(*channels.values()):
            check(columns.count(name) == 1, where, f"feature {name} once", columns)
    for name in channels["categorical"]:
        facts = sections["feature_spec"].get(name)
        size = facts.get("cardinality") if isinstance(facts, dict) else facts
        valid = size == "auto" or (type(size) is int and size > 0)
        check(valid, f"feature {name}", 'a cardinality of 1 or more, or "auto"', size)
        sizes[name] = None if size == "auto" else size
    label, numerical = channels["label"][0], channels["numerical"]
    return plain_schema(label, numerical, sizes, required=False), splits


def read_rows(
    folder: Path, chunks: Sequence[Chunk], columns: Sequence[str], most: int
) -> pa.RecordBatchReader:
    """Reads the columns of a split; a row consists of those of all chunks with its number."""
    for path in (folder / name for chunk in chunks for name in chunk["files"]):
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file")
    wanted = [[name for name in chunk["features"] if name in columns] for chunk in chunks]
    schema = pa.schema([(name, pa.string()) for name in chain(*wanted)])
    pairs = zip(chunks, wanted, strict=True)
    parts = [_read_chunk(folder, chunk, names, most) for chunk, names in pairs if names]

    def batches() -> Iterator[pa.RecordBatch]:
        for tables in zip(*parts, strict=False):
            if len({len(table) for table in tables}) > 1:
                raise ValueError(f"{folder}: expected chunks with the same number of rows")
            arrays = list(chain(*(table.columns for table in tables)))
            yield from pa.Table.from_arrays(arrays, schema=schema).to_batches()

    return pa.RecordBatchReader.from_batches(schema, batches())


def _read_chunk(folder: Path, chunk: Chunk, wanted: list[str], most: int) -> Iterator[pa.Table]:
    """Yields tables of `most` rows, and then one of fewer, or none."""
    options = {
        "read_options": csv.ReadOptions(column_names=chunk["features"]),
        "parse_options": csv.ParseOptions(newlines_in_values=True),
        "convert_options": csv.ConvertOptions(
            column_types=dict.fromkeys(wanted, pa.string()), include_columns=wanted
        ),
    }
    held = pa.schema([(name, pa.string()) for name in wanted]).empty_table()
    for path in (folder / name for name in chunk["files"]):
        try:
            for batch in csv.open_csv(path, **options) if path.stat().st_size else ():
                held = pa.concat_tables([held, pa.Table.from_batches([batch])])
                while len(held) >= most:
                    yield held.slice(0, most)
                    held = held.slice(most)
        except pa.ArrowInvalid as error:
            raise ValueError(f"{path}: {error}") from error
    yield held
