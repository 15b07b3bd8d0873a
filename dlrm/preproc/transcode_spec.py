"""NVIDIA's feature specifications of CSV: the schema that they give, and the rows of a split."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv

from dlrm.data.clicks.feature_spec import CHANNELS, is_list_of_text, read_sections
from dlrm.data.clicks.names import SPLITS
from dlrm.data.transform.schema import CategoricalField, Label, NumericalField, Schema
from dlrm.documents import brief
from dlrm.files import within

_BLOCK_BYTES = 1 << 24  # of a file, parsed at a time; a row has to fit


def read_csv_spec(path: Path) -> tuple[Schema, dict[str, list[dict[str, Any]]]]:
    """Returns the schema of a specification, and the chunks of each split.

    Raises:
        FileNotFoundError, ValueError: it or a file is missing, or it breaks a rule.
    """
    sections = read_sections(path)
    channels, splits = sections["channel_spec"], sections["source_spec"]
    lists = all(map(is_list_of_text, channels.values()))
    if set(channels) != set(CHANNELS) or not lists or len(channels["label"]) != 1:
        expected = "expected categorical, numerical and label, with one label"
        raise ValueError(f"{path}: channel_spec: {expected}, got {brief(channels)}")
    if not {"train", "test"} <= set(splits) <= set(SPLITS):
        expected = "expected the splits train and test, and possibly validation"
        raise ValueError(f"{path}: source_spec: {expected}, got {brief(list(splits))}")
    for split, chunks in splits.items():
        where = f"{path}: source_spec {split}"
        for chunk in chunks if isinstance(chunks, list) else [chunks]:
            known = chunk if isinstance(chunk, dict) else {}
            named = [known.get("features"), known.get("files")]
            if known.get("type") != "csv" or not all(map(is_list_of_text, named)):
                expected = "expected chunks of type csv with features and files"
                raise ValueError(f"{where}: {expected}, got {brief(chunk)}")
            for name in chunk["files"]:
                within(path.parent, name, path, allow_links=False)
        columns = [name for chunk in chunks for name in chunk["features"]]
        for name in (name for names in channels.values() for name in names):
            if (count := columns.count(name)) != 1:
                raise ValueError(f"{where}: expected feature {name} once, got it {count} times")
    categorical = []
    for name in channels["categorical"]:
        facts = sections["feature_spec"].get(name)
        size = facts.get("cardinality") if isinstance(facts, dict) else facts
        if size != "auto" and (type(size) is not int or size < 1):
            expected = 'expected a cardinality of 1 or more, or "auto"'
            raise ValueError(f"{path}: feature {name}: {expected}, got {brief(size)}")
        size = None if size == "auto" else size
        categorical.append(CategoricalField(name, "id", cardinality=size))
    numerical = tuple(NumericalField(name, "none") for name in channels["numerical"])
    return Schema(Label(channels["label"][0]), numerical, tuple(categorical)), splits


def read_rows(
    folder: Path, chunks: Sequence[dict[str, Any]], columns: Sequence[str], most: int
) -> pa.RecordBatchReader:
    """Reads the columns of a split; a row consists of those of all chunks with its number."""
    for file in (folder / name for chunk in chunks for name in chunk["files"]):
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file")
    parts = [_read_chunk(folder, chunk, columns) for chunk in chunks]
    names = [name for chunk in chunks for name in chunk["features"] if name in columns]
    schema = pa.schema([(name, pa.string()) for name in names])

    def batches() -> Iterator[pa.RecordBatch]:
        held = [next(part, None) for part in parts]
        while there := [batch for batch in held if batch is not None]:
            if len(there) < len(held):
                raise ValueError(f"{folder}: expected chunks with the same number of rows")
            rows = min(most, *map(len, there))
            arrays = [array for batch in there for array in batch.slice(0, rows).columns]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)
            held = [
                batch.slice(rows) if len(batch) > rows else next(part, None)
                for batch, part in zip(there, parts, strict=True)
            ]

    return pa.RecordBatchReader.from_batches(schema, batches())


def _read_chunk(
    folder: Path, chunk: dict[str, Any], columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    wanted = [name for name in chunk["features"] if name in columns]
    types = dict.fromkeys(wanted, pa.string())
    options = {
        "read_options": csv.ReadOptions(column_names=chunk["features"], block_size=_BLOCK_BYTES),
        "parse_options": csv.ParseOptions(newlines_in_values=True),
        "convert_options": csv.ConvertOptions(column_types=types, include_columns=wanted),
    }
    for name in chunk["files"] if wanted else []:
        try:
            if (folder / name).stat().st_size:
                yield from filter(len, csv.open_csv(folder / name, **options))
        except pa.ArrowInvalid as error:
            raise ValueError(f"{folder / name}: {error}") from error
