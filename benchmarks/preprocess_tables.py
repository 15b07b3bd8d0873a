"""The sides of `preprocess.py --what tables`: from a file of 40 columns to one dataset.

A random fifth of the rows are test rows; training rows are shuffled. Dictionaries have the values
that occur at least 15 times in the training rows, numbers become ln(x + 2) in half precision, and
every feature has a file of its own.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from dlrm.data import layout
from dlrm.data.schema.schema import CategoricalField, Label, NumericalField, Schema

LIMIT = 15
NUMBERS = [f"n{i}" for i in range(13)]
TEXTS = [f"c{i}" for i in range(26)]
_DISTINCT = (50, 1000, 30_000, 1_000_000)  # at most, of the columns of texts in turn
_CHUNK_ROWS = 250_000
ROWS_OF_FILE = 100


def write_table(path: Path, rows: int) -> None:
    """Writes a table whose numbers are log-normal and whose texts follow Zipf's law.

    The suffix of the path is `.parquet`, `.csv` or `.jsonl`.
    """
    write = {".parquet": _write_parquet, ".csv": _write_csv, ".jsonl": _write_json}[path.suffix]
    write(path, _tables(rows))


def write_files(folder: Path, count: int, kind: str) -> None:
    """Writes the same table as small files."""
    folder.mkdir()
    write, number = {"parquet": _write_parquet, "csv": _write_csv}[kind], 0
    for table in _tables(count * ROWS_OF_FILE):
        for begin in range(0, len(table), ROWS_OF_FILE):
            part = iter([table.slice(begin, ROWS_OF_FILE)])
            write(folder / f"{number:05}.{kind}", part)
            number += 1


def _tables(rows: int) -> Iterator[pa.Table]:
    random = np.random.default_rng(0)
    for begin in range(0, rows, _CHUNK_ROWS):
        count = min(_CHUNK_ROWS, rows - begin)
        columns = {"label": pa.array((random.random(count) < 0.2).astype(np.int8))}
        for name in NUMBERS:
            values = random.lognormal(1, 1, count).astype(np.float32)
            columns[name] = pa.array(values, mask=random.random(count) < 0.1)
        for i, name in enumerate(TEXTS):
            ranks = np.minimum(random.zipf(1.2, count), _DISTINCT[i % 4])
            texts = np.char.add("val_", ranks.astype("U9"))
            columns[name] = pa.array(texts, mask=random.random(count) < 0.05)
        yield pa.table(columns)


def _write_parquet(path: Path, tables: Iterator[pa.Table]) -> None:
    first = next(tables)
    with pq.ParquetWriter(path, first.schema) as writer:
        for table in (first, *tables):
            writer.write_table(table)


def _write_csv(path: Path, tables: Iterator[pa.Table]) -> None:
    first = next(tables)
    options = pa_csv.WriteOptions(quoting_style="none")
    with pa_csv.CSVWriter(path, first.schema, write_options=options) as writer:
        for table in (first, *tables):
            writer.write_table(table)


def _write_json(path: Path, tables: Iterator[pa.Table]) -> None:
    with open(path, "w") as file:
        for table in tables:
            for row in _short(table).to_pylist():
                file.write(json.dumps(row) + "\n")


def _short(table: pa.Table) -> pa.Table:
    """Returns a table whose numbers have few digits as float64 as well."""
    kinds = [pa.float64() if pa.types.is_float32(field.type) else None for field in table.schema]
    columns = [
        column.cast(pa.string()).cast(kind) if kind else column
        for kind, column in zip(kinds, table.columns, strict=True)
    ]
    return pa.table(columns, table.schema.names)


def command(options: argparse.Namespace, engine: str) -> list[str]:
    """Writes the schema beside the output; returns our command."""
    fields = [NumericalField(name, "log") for name in NUMBERS]
    ids = [CategoricalField(name, frequency_limit=LIMIT) for name in TEXTS]
    schema = options.output.with_name("schema.yaml")
    Schema(Label("label"), tuple(fields), tuple(ids)).save(schema)
    words = [sys.executable, "-u", "-m", "dlrm.scripts.prepare", f"--engine={engine}"]
    words += [f"--schema={schema}", f"--input={options.raw}", f"--output={options.output}"]
    return [*words, f"--cores={options.cores}", "--noreport"]


def with_polars(options: argparse.Namespace) -> None:
    """The same dataset out of a data frame in memory."""
    os.environ["POLARS_MAX_THREADS"] = str(options.cores)
    import polars as pl

    read = {".parquet": pl.read_parquet, ".csv": pl.read_csv, ".jsonl": pl.read_ndjson}
    frame = read[options.raw.suffix](options.raw)
    order = np.random.default_rng(0).permutation(len(frame))
    rows = {"train": order[len(order) // 5 :], "test": np.sort(order[: len(order) // 5])}
    training = np.zeros(len(frame), bool)
    training[rows["train"]] = True
    columns, known = frame.lazy(), frame.filter(pl.Series(training)).lazy()

    def ids_of(name: str) -> pl.LazyFrame:
        counts = known.select(name).drop_nulls().group_by(name).len()
        kept = counts.filter(pl.col("len") >= LIMIT).sort(["len", name], descending=[True, False])
        ids = kept.with_row_index("id", 1).select(name, "id")
        joined = columns.select(name).join(ids, on=name, how="left", maintain_order="left")
        return joined.select(pl.col("id").fill_null(0).alias(name))

    numbers = columns.select(
        (pl.col(name).fill_null(0).cast(pl.Float64) + 2).clip(1, None).log().cast(pl.Float32)
        for name in NUMBERS
    )
    logarithms, *ids = pl.collect_all([numbers, *map(ids_of, TEXTS)])
    cardinalities = [int(one.to_series().max()) + 1 for one in ids]
    numerical = logarithms.to_numpy().astype(np.float16)
    labels = frame["label"].cast(pl.Boolean).to_numpy()
    for name, places in rows.items():
        folder = options.output / name
        folder.mkdir(parents=True)
        labels[places].tofile(folder / "label.bin")
        numerical[places].tofile(folder / "numerical.bin")
        for i, (one, size) in enumerate(zip(ids, cardinalities, strict=True)):
            values = one.to_series().to_numpy().astype(layout.id_dtype(size))
            values[places].tofile(folder / f"cat_{i}.bin")
    layout.write_model_size(options.output, cardinalities)
