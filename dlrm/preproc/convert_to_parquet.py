"""Converts a dataset to Parquet, with ids or with the values that they stand for.

    OUTPUT/train/part-0.parquet  test/part-0.parquet  validation/part-0.parquet  manifest.json

Row k of a split is row k of the dataset. The first column is the label, bool; numerical features
are float32, transformed as in the dataset; then come the categorical features, each list followed
by its weights, and the sample weight, the groups (64-bit hashes) and the time if the dataset has
them. Columns have the names of the source; a weight, group or time that is also an input is named
`weight`, `group_<column>` or `time`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dlrm.data import layout
from dlrm.data.bags import check_values
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.list_columns import ListColumn
from dlrm.data.schema.schema import Schema
from dlrm.data.transform.dictionaries import text_array
from dlrm.data.transform.rows import extra_dtypes
from dlrm.data.transform.transform import Transform
from dlrm.data.verification import Verifier
from dlrm.files import atomic_directory
from dlrm.manifest import write_manifest
from dlrm.preproc.options import PARQUET_VALUES

KIND = layout.CONVERTED  # kind in its manifest
_PART = "part-0.parquet"
_GROUP_ROWS = 1 << 16
_TIME = pa.timestamp("us", "UTC")
Decode = Callable[[np.ndarray], pa.Array]


def convert_to_parquet(
    dataset: Path,
    output: Path,
    values: str = "decoded",
    replace: bool = False,
    verify_data: str = "first",
    allow_links: bool = False,
) -> dict[str, int]:
    """Writes a split-binary dataset as Parquet, one row group at a time; returns rows by split.

    Args:
        dataset: dataset made from tables or logs.
        output: directory to write, which appears when it is complete.
        values: "ids" of categorical features, or "decoded": their texts, integers or, for logs,
            hexadecimal digits, with null for id 0 and ids of hash buckets.
        replace: whether to replace earlier output.
        verify_data: whether and when to compare files with the dataset's checksums; see `Verifier`.
        allow_links: whether files of the dataset may be symbolic links out of it.

    Raises:
        FileNotFoundError: a file of the dataset is missing.
        FileExistsError: `output` exists and may not be replaced.
        ValueError: a file is damaged, or a value contradicts the dataset's specification; the
            message names file and row.
    """
    if values not in PARQUET_VALUES:
        raise ValueError(f"--values {values}: expected one of {', '.join(PARQUET_VALUES)}")
    _check_apart(dataset, output)
    spec = FeatureSpec.load(dataset, allow_links)
    verifier = Verifier(dataset, layout.KIND, verify_data, allow_links)
    fitted = _fitted(dataset, spec, verifier, values)
    rows = {split: spec.num_rows(split) for split in spec.splits}
    with atomic_directory(output, KIND if replace else False) as staging:
        for split in spec.splits:
            (staging / split).mkdir()
            columns = _columns(spec, split, fitted, values == "decoded", verifier)
            _write_split(staging / split / _PART, columns, rows[split])
        if values == "ids" and not spec.lists:
            layout.write_model_size(staging, spec.cardinalities)
        write_manifest(staging, KIND, values=values, rows=rows)
    return rows


def _write_split(path: Path, columns: Sequence["_Column"], rows: int) -> None:
    schema = pa.schema([field for column in columns for field in column.fields])
    with pq.ParquetWriter(path, schema) as writer:
        for begin in range(0, rows, _GROUP_ROWS):
            end = min(begin + _GROUP_ROWS, rows)
            arrays = [array for column in columns for array in column.read(begin, end)]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema), _GROUP_ROWS)


def _check_apart(dataset: Path, output: Path) -> None:
    source, target = dataset.resolve(), output.resolve()
    if source == target or source in target.parents or target in source.parents:
        raise ValueError(f"--output {output}: expected a directory apart from {dataset}")


def _fitted(dataset: Path, spec: FeatureSpec, verifier: Verifier, values: str) -> Transform | None:
    """Returns the transform of a dataset; None if there is none and ids are written."""
    directory = dataset / layout.TRANSFORM
    if not directory.is_dir():
        if values == "ids":
            return None
        raise FileNotFoundError(
            f"{directory}: no such directory, so nothing says what ids stand for; --values ids "
            "writes them as they are"
        )
    verifier.check_names(layout.TRANSFORM)
    fitted = Transform.load(directory)
    if fitted.cardinalities != spec.cardinalities:
        raise ValueError(
            f"{directory}: expected the transform of this dataset, with tables of "
            f"{spec.cardinalities} rows, got one with {fitted.cardinalities}"
        )
    return fitted


class _Column(NamedTuple):
    """Columns of Parquet, and a function that reads rows of them from the dataset."""

    fields: list[pa.Field]
    read: Callable[[int, int], list[pa.Array]]


def _columns(
    spec: FeatureSpec, split: str, fitted: Transform | None, decoded: bool, verifier: Verifier
) -> list[_Column]:
    file = partial(_file, verifier=verifier, rows=spec.num_rows(split))
    label, limits = spec.file(split, spec.label), ("a label of 0 or 1", 1)
    columns = [file(label, [spec.label], np.dtype(np.uint8), pa.bool_(), limits=limits)]
    if names := spec.numerical:
        row = np.dtype((layout.NUMERICAL_DTYPE, (len(names),)))
        columns.append(file(spec.file(split, names[0]), names, row, pa.float32()))
    names, sizes = _without_endings(spec), spec.cardinalities
    for i, (feature, name, size) in enumerate(zip(spec.categorical, names, sizes, strict=True)):
        arrow_type, decode = pa.from_numpy_dtype(dtype := spec.dtype(feature)), pa.array
        if decoded and fitted is not None:
            arrow_type, decode = _decoder(fitted, i)
        if feature in spec.lists:
            weights = fitted.fields[i].weights if fitted is not None else None
            weights = weights or f"{name}_weights"
            column = ListColumn(spec, split, feature, spec.num_rows(split))
            verifier.check(filter(None, column.files))
            columns.append(_lists(column, name, weights, size, arrow_type, decode))
            continue
        path, limits = spec.file(split, feature), (f"an id within 0-{size - 1}", size - 1)
        columns.append(file(path, [name], dtype, arrow_type, decode, limits))
    if fitted is not None:
        sources = _extra_sources(fitted.schema)
        taken = {field.name for column in columns for field in column.fields}
        for name, dtype in extra_dtypes(fitted.schema).items():
            path = label.parent / f"{name}.bin"
            arrow_type = _TIME if name == "time" else pa.from_numpy_dtype(dtype)
            name = sources[name] if sources[name] not in taken else name
            while name in taken:
                name += "_"
            taken.add(name)
            columns.append(file(path, [name], dtype, arrow_type))
    return columns


def _extra_sources(schema: Schema) -> dict[str, str]:
    """Returns the source's columns for the names of `extra_dtypes`."""
    sources = {f"group_{name}": name for name in schema.groups}
    sources |= {"weight": schema.weight} if schema.weight else {}
    return sources | ({"time": schema.time.column} if schema.time else {})


def _without_endings(spec: FeatureSpec) -> list[str]:
    """Returns the names of categorical features; NVIDIA's default ones without their ".bin"."""
    default = [layout.categorical_name(i) for i in range(len(spec.categorical))]
    if spec.categorical != default:
        return spec.categorical
    short = [name.removesuffix(".bin") for name in default]
    return spec.categorical if {spec.label, *spec.numerical} & set(short) else short


def _file(
    path: Path,
    names: Sequence[str],
    dtype: np.dtype,
    arrow_type: pa.DataType,
    decode: Decode | None = None,
    limits: tuple[str, int] | None = None,
    *,
    verifier: Verifier,
    rows: int,
) -> _Column:
    """Returns the columns of a file with a value for each name per row.

    Args:
        decode: converts values of a column to `arrow_type`; by default a cast.
        limits: a description of the whole numbers that are expected, and the greatest; None for
            any numbers.
    """
    width = dtype.itemsize
    content = layout.map_rows(path, np.dtype(np.uint8), (rows, width)).ravel()
    verifier.check([path])

    def read(begin: int, end: int) -> list[pa.Array]:
        values = np.frombuffer(content[begin * width : end * width].data, dtype)
        if limits and (wrong := (values < 0) | (values > limits[1])).any():
            row = int(wrong.argmax())
            raise ValueError(f"{path}: row {begin + row}: expected {limits[0]}, got {values[row]}")
        columns = values.reshape(len(values), -1).T
        return [decode(one) if decode else pa.array(one).cast(arrow_type) for one in columns]

    return _Column([pa.field(name, arrow_type) for name in names], read)


def _lists(
    column: ListColumn, name: str, weights: str, size: int, arrow_type: pa.DataType, decode: Decode
) -> _Column:
    """Returns the column of a list field, and that of its weights if it has some."""
    fields = [pa.field(name, pa.large_list(arrow_type))]
    if column.field.weighted:
        fields.append(pa.field(weights, pa.large_list(pa.float32())))

    def read(begin: int, end: int) -> list[pa.Array]:
        rows = column.read(begin, end)
        valid, expected = (rows.values >= 0) & (rows.values < size), f"an id in [0, {size})"
        check_values(rows.values, valid, column.files.values, begin, expected, rows.lengths)
        ends = pa.array(np.concatenate([[0], np.cumsum(rows.lengths, dtype=np.int64)]))
        arrays = [decode(rows.values)] + ([] if rows.weights is None else [pa.array(rows.weights)])
        return [pa.LargeListArray.from_arrays(ends, array) for array in arrays]

    return _Column(fields, read)


def _decoder(fitted: Transform, table: int) -> tuple[pa.DataType, Decode]:
    """Returns the type of a table's values, and a function from ids to values."""
    index = fitted.dictionary_of[table]
    fitted.check(index)
    dictionary = fitted.dictionaries[index]
    if dictionary.type == "id":
        return pa.int64(), lambda ids: pa.array(ids.astype(np.int64))
    if dictionary.type == "integer":
        dtype, value_of = pa.int64(), lambda key: pa.array(key.astype(np.uint64).view(np.int64))
    elif dictionary.type == "hexadecimal":
        dtype, value_of = pa.large_string(), _hexadecimal
    keys = dictionary.keys
    if dictionary.texts is not None:
        ends = np.concatenate([np.zeros(1, np.int64), np.asarray(dictionary.ends)])
        texts = text_array(ends, dictionary.texts.data)
        keys = np.arange(len(dictionary), dtype=np.int64)
        dtype, value_of = pa.large_string(), lambda key: texts.take(pa.array(key)).cast(dtype)

    def values_of(some: np.ndarray) -> pa.Array:
        try:
            return value_of(some)
        except pa.ArrowInvalid:
            raise ValueError(
                f"column {fitted.fields[table].column}: a value is not UTF-8, in which Parquet "
                "has texts; --values ids writes ids"
            ) from None

    every = values_of(keys) if len(keys) <= _GROUP_ROWS else None

    def decode(ids: np.ndarray) -> pa.Array:
        indices = ids.astype(np.int64) - 1
        has_value = (indices >= 0) & (indices < len(keys))  # others have no single value
        if every is not None:
            return every.take(pa.array(indices, mask=~has_value))
        values = values_of(keys[indices[has_value]])
        return values.take(pa.array(np.cumsum(has_value) - 1, mask=~has_value))

    return dtype, decode


def _hexadecimal(numbers: np.ndarray) -> pa.Array:
    """Returns numbers as 8 digits, or as many as they need."""
    raw = numbers.astype(numbers.dtype.newbyteorder(">")).tobytes()
    digits = np.frombuffer(raw.hex().encode(), np.uint8).reshape(len(numbers), -1)
    longer = np.uint64(16) ** np.arange(8, 16, dtype=np.uint64)
    lengths = 8 + np.searchsorted(longer, numbers, side="right")
    shown = np.arange(digits.shape[1]) >= digits.shape[1] - lengths[:, None]
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return text_array(ends, digits[shown].tobytes()).cast(pa.large_string())
