"""Turns Parquet files with transformed values into a dataset.

    python -m dlrm.preproc.convert_to_binary --source PARQUET --output DATASET

PARQUET is a directory with train/, test/ and optionally validation/, as Spark writes them, or a
file or directory whose last rows, the share --held_out, become test/ and validation/, half each.
Row k of the dataset is row k of the Parquet, with files in the order of their names.

The first column is the label. Floating-point columns are numbers, which are copied, and integer
columns are ids. Table sizes are those of model_size.json beside the directories, if it exists,
otherwise the greatest id plus one.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.command_line import Parser, exit_code_of
from dlrm.data.clicks import layout
from dlrm.data.clicks.bags import Bags
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.writer import SplitWriter
from dlrm.documents import brief
from dlrm.files import staged_directory

OUTPUT_FORMATS = ("split_binary", "binary")
_BATCH_ROWS = 1 << 16


@dataclass(frozen=True)
class Source:
    """The rows [first, last) of some Parquet files."""

    files: list[Path]
    first: int
    last: int


@dataclass(frozen=True)
class Columns:
    """Names of the columns: the label, the numbers and the ids."""

    label: str
    numerical: list[str]
    categorical: list[str]


def convert(source: Path, output: Path, output_format: str, held_out: float) -> dict[str, int]:
    """Writes a dataset; returns the rows of each split.

    Raises:
        FileNotFoundError: there is no Parquet.
        ValueError: a file is not Parquet or has other columns, or a value is out of range.
        FileExistsError: `output` exists and may not be replaced.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"--held_out {held_out}: expected a number in (0, 1)")
    sources = _sources(source, held_out)
    columns = _columns([file for part in sources.values() for file in part.files])
    sizes = _table_sizes(source, sources, columns)
    with staged_directory(output, replace=True) as staging:
        spec = FeatureSpec.default(staging, len(columns.numerical), sizes, list(sources))
        for split, part in sources.items():
            writer = SplitWriter if output_format == "split_binary" else _BinaryFile
            with writer(spec, split) as file:
                for labels, numbers, ids in _batches(part, columns):
                    file.write(labels, numbers, ids)
        if output_format == "split_binary":
            spec.save()
        layout.write_model_size(staging, sizes)
        rows = {split: part.last - part.first for split, part in sources.items()}
        facts = {"converted_from": source.name, "output_format": output_format}
        layout.write_dataset_manifest(staging, rows, sizes, facts)
    return rows


class _BinaryFile(SplitWriter):
    """Writes the rows of a split as NVIDIA's words of four bytes; see `SplitWriter`."""

    def __enter__(self) -> "_BinaryFile":
        name = "val" if self._split == "validation" else self._split  # as split_dataset.py reads it
        self._file = open(self._spec.directory / f"{name}_data.bin", "xb")  # noqa: SIM115
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.close()

    def write(
        self, labels: np.ndarray, numerical: np.ndarray, categorical: Sequence[np.ndarray | Bags]
    ) -> None:
        """Appends samples, whose categorical features have one id per row."""
        columns = [ids for ids in categorical if not isinstance(ids, Bags)]
        for name, ids in zip(self._spec.categorical, columns, strict=True):
            self._check_ids(name, ids)
        self._to_half(numerical)  # refuses numbers that a split-binary dataset cannot hold
        words = [labels[:, None].astype("<i4"), numerical.astype("<f4").view("<i4")]
        words += [ids[:, None].astype("<i4") for ids in columns]
        self._file.write(np.concatenate(words, axis=1).data)
        self.num_rows += len(labels)


def _sources(source: Path, held_out: float) -> dict[str, Source]:
    """Returns the part of the Parquet of each split."""
    if (source / "train").is_dir():
        names = [name for name in layout.SPLITS if (source / name).is_dir()]
        if "test" not in names:
            raise FileNotFoundError(f"{source / 'test'}: missing, though there is a train/")
        parts = {name: _files(source / name) for name in names}
        return {name: Source(files, 0, _rows(files)) for name, files in parts.items()}
    files = _files(source)
    rows = _rows(files)
    train = rows - round(rows * held_out)
    edges = [0, train, train + (rows - train) // 2, rows]
    if train == 0 or train == rows:
        raise ValueError(f"{source}: {rows} rows leave none for training, or none to test on")
    return {
        name: Source(files, first, last)
        for name, first, last in zip(layout.SPLITS, edges, edges[1:], strict=False)
    }


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    files = sorted(path for path in source.rglob("*.parquet") if path.is_file())
    if not files:
        raise FileNotFoundError(f"{source}: no Parquet file, nor a folder with some")
    return files


def _open(path: Path):
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not Parquet ({brief(error)})") from error


def _rows(files: list[Path]) -> int:
    return sum(_open(path).metadata.num_rows for path in files)


def _columns(files: list[Path]) -> Columns:
    """Returns the columns of the first file, and checks that the others have the same."""
    import pyarrow.types as types

    schema = _open(files[0]).schema_arrow
    for path in files[1:]:
        if not _open(path).schema_arrow.equals(schema):
            raise ValueError(f"{path}: expected the columns of {files[0]}, got others")
    if repeated := [name for name in schema.names if schema.names.count(name) > 1]:
        raise ValueError(f"{files[0]}: two columns are called {brief(repeated[0])}")
    numerical, categorical = [], []
    for field in list(schema)[1:]:
        if types.is_floating(field.type):
            numerical.append(field.name)
        elif types.is_integer(field.type):
            categorical.append(field.name)
        else:
            raise ValueError(
                f"{files[0]}: column {field.name}: expected floating-point or integer numbers, got "
                f"{field.type}: is it transformed already?"
            )
    if not numerical and not categorical:
        raise ValueError(f"{files[0]}: expected a label and features, got {schema.names}")
    return Columns(schema.names[0], numerical, categorical)


def _table_sizes(source: Path, sources: dict[str, Source], columns: Columns) -> list[int]:
    if (source / layout.MODEL_SIZE).is_file():
        sizes = layout.read_model_size(source)
        if len(sizes) != len(columns.categorical):
            raise ValueError(
                f"{source / layout.MODEL_SIZE}: expected {len(columns.categorical)} tables, as the "
                f"Parquet has integer columns, got {len(sizes)}"
            )
        return sizes
    largest: np.ndarray = np.zeros(len(columns.categorical), np.int64)
    for part in sources.values():
        for _, _, ids in _batches(part, columns):
            if len(ids) and len(ids[0]):
                largest = np.maximum(largest, [column.max() for column in ids])
    return (largest + 1).tolist()


def _batches(
    source: Source, columns: Columns
) -> Iterator[tuple[np.ndarray, np.ndarray, list[np.ndarray]]]:
    """Yields labels, numbers `[rows, num_numerical]` and the ids of each table."""
    place = 0
    for path in source.files:
        file, in_file = _open(path), 0
        if place + file.metadata.num_rows <= source.first or place >= source.last:
            place += file.metadata.num_rows
            continue
        for batch in _read_batches(path, file):
            begin = max(source.first - place, 0)
            end = min(source.last - place, batch.num_rows)
            if begin < end:
                part = batch.slice(begin, end - begin)
                yield _arrays(path, in_file + begin, part, columns)
            place += batch.num_rows
            in_file += batch.num_rows


def _read_batches(path: Path, file) -> Iterator:
    import pyarrow

    try:
        yield from file.iter_batches(_BATCH_ROWS)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: damaged Parquet ({brief(error)})") from error


def _arrays(path: Path, row: int, batch, columns: Columns):
    def column(name: str) -> np.ndarray:
        values = batch.column(name)
        if values.null_count:
            missing = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
            raise ValueError(f"{path}: row {row + missing}, column {name}: expected a value")
        return values.to_numpy(zero_copy_only=False)

    labels = column(columns.label)
    wrong = (labels != 0) & (labels != 1)
    if wrong.any():
        first = int(wrong.argmax())
        raise ValueError(
            f"{path}: row {row + first}, column {columns.label}: expected a label of 0 or 1, got "
            f"{labels[first]}"
        )
    numbers = np.empty((len(labels), len(columns.numerical)), np.float32)
    for i, name in enumerate(columns.numerical):
        numbers[:, i] = column(name)
        if not (finite := np.isfinite(numbers[:, i])).all():
            first = int(finite.argmin())
            raise ValueError(
                f"{path}: row {row + first}, column {name}: expected a finite number, got "
                f"{numbers[first, i]}"
            )
    return labels.astype(bool), numbers, [column(name) for name in columns.categorical]


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return exit_code_of(lambda: _run(_parse(arguments)))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        __doc__, "python -m dlrm.preproc.convert_to_binary" if __name__ == "__main__" else None
    )
    parser.add_argument(
        "--source", type=Path, required=True, help="Parquet file, or directory of Parquet files"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="directory to write the dataset to"
    )
    parser.add_argument(
        "--output_format",
        choices=OUTPUT_FORMATS,
        default=OUTPUT_FORMATS[0],
        help="split_binary: one file per feature; binary: NVIDIA's rows of 4-byte words",
    )
    parser.add_argument(
        "--held_out",
        type=float,
        default=0.1,
        help="share of the rows, the last ones, for test and validation (0.1)",
    )
    return parser.parse_args(arguments)


def _run(flags: argparse.Namespace) -> None:
    rows = convert(flags.source, flags.output, flags.output_format, flags.held_out)
    shown = "  ".join(f"{name} {count:,}" for name, count in rows.items())
    print(f"{flags.output}: {shown} rows; complete")


if __name__ == "__main__":
    sys.exit(main())
