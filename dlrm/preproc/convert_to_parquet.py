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
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dlrm.data.clicks import layout
from dlrm.data.clicks.bags import first_problem
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.list_columns import ListColumn
from dlrm.data.transform.dictionaries import Dictionary, text_array
from dlrm.data.transform.rows import extra_dtypes
from dlrm.data.transform.schema import Schema
from dlrm.data.transform.transform import Transform
from dlrm.data.verification import Verifier
from dlrm.files import staged_directory
from dlrm.manifest import write_manifest
from dlrm.mapped_files import map_file
from dlrm.preproc.options import PARQUET_VALUES

KIND = layout.CONVERTED  # kind in its manifest
_PART = "part-0.parquet"
_GROUP_ROWS = 1 << 16
_FEWEST_DIGITS = 8  # digits of a hexadecimal value, as in Criteo's logs
_BYTE = np.dtype(np.uint8)
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
    with staged_directory(output, KIND if replace else False) as staging:
        rows = {split: spec.num_rows(split) for split in spec.splits}
        for split in spec.splits:
            (staging / split).mkdir()
            columns = _columns(spec, split, fitted, values, verifier)
            _write_split(staging / split / _PART, columns, rows[split], verifier)
        if values == "ids" and not spec.lists:
            layout.write_model_size(staging, spec.cardinalities)
        write_manifest(staging, KIND, values=values, rows=rows)
    return rows


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
    """A file of a split, and the Parquet columns made from its rows.

    Attributes:
        path: the file.
        names: names of the columns.
        dtype: dtype of a row of the file.
        kind: type of the columns.
        decode: converts values of a column.
        expected: a value's description, if it is a whole number from 0 to `most`.
    """

    path: Path
    names: list[str]
    dtype: np.dtype
    kind: pa.DataType
    decode: Decode
    expected: str | None = None
    most: int = 1

    @property
    def kinds(self) -> list[pa.DataType]:
        """Types of the columns."""
        return [self.kind] * len(self.names)


class _Lists(NamedTuple):
    """A list field of a split, and its Parquet column, or two columns with weights.

    Attributes:
        column: its files.
        names, kinds: names and types of the columns.
        size: rows of the table.
        decode: converts ids into the values of the lists.
    """

    column: ListColumn
    names: list[str]
    kinds: list[pa.DataType]
    size: int
    decode: Decode

    def read(self, begin: int, end: int) -> list[pa.Array]:
        """Returns rows as an array for each column."""
        rows = self.column.read(begin, end)
        field = self.column.field
        if (problem := first_problem(rows, field, self.size)) is not None:
            row, why = problem
            raise ValueError(f"{self.column.files.values}: row {begin + row}, {why}")
        ends = pa.array(np.concatenate([[0], np.cumsum(rows.lengths, dtype=np.int64)]))
        arrays = [pa.LargeListArray.from_arrays(ends, self.decode(rows.values))]
        if rows.weights is not None:
            arrays.append(pa.LargeListArray.from_arrays(ends, pa.array(rows.weights)))
        return arrays


def _columns(
    spec: FeatureSpec, split: str, fitted: Transform | None, values: str, verifier: Verifier
) -> list[_Column | _Lists]:
    label = spec.file(split, spec.label)
    columns: list[_Column | _Lists] = [
        _Column(label, [spec.label], _BYTE, pa.bool_(), _booleans, "a label of 0 or 1")
    ]
    if spec.numerical:
        path, row = spec.file(split, spec.numerical[0]), (len(spec.numerical),)
        dtype = np.dtype((layout.NUMERICAL_DTYPE, row))
        columns.append(_Column(path, spec.numerical, dtype, pa.float32(), _numbers))
    names, sizes = _without_endings(spec), spec.cardinalities
    for i, (feature, size) in enumerate(zip(spec.categorical, sizes, strict=True)):
        path, dtype = spec.file(split, feature), spec.dtype(feature)
        kind, decode = pa.from_numpy_dtype(dtype), pa.array
        if values == "decoded" and fitted is not None:
            kind, decode = _decoder(fitted, i)
        if feature in spec.lists:
            columns_of, kinds = [names[i]], [pa.large_list(kind)]
            if spec.lists[feature].weighted:
                known = fitted and fitted.fields[i]
                columns_of.append((known and known.weights) or f"{names[i]}_weights")
                kinds.append(pa.large_list(pa.float32()))
            column = ListColumn(spec, split, feature, spec.num_rows(split), verifier)
            columns.append(_Lists(column, columns_of, kinds, size, decode))
            continue
        expected = f"an id within 0-{size - 1}"
        columns.append(_Column(path, [names[i]], dtype, kind, decode, expected, size - 1))
    if fitted is not None:
        sources = _extra_sources(fitted.schema)
        taken = {name for column in columns for name in column.names}
        for name, dtype in extra_dtypes(fitted.schema).items():
            path = label.parent / f"{name}.bin"
            kind = _TIME if name == "time" else pa.from_numpy_dtype(dtype)
            name = sources[name] if sources[name] not in taken else name
            while name in taken:
                name += "_"
            taken.add(name)
            columns.append(_Column(path, [name], dtype, kind, partial(_cast, kind)))
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


def _write_split(
    path: Path, columns: Sequence[_Column | _Lists], rows: int, verifier: Verifier
) -> None:
    names = [name for column in columns for name in column.names]
    schema = pa.schema(list(zip(names, [k for c in columns for k in c.kinds], strict=True)))
    readers = []
    for column in columns:
        if isinstance(column, _Column):
            layout.check_rows(column.path, rows, column.dtype.itemsize)
            readers.append(_reader(column, verifier))
        else:
            readers.append(column.read)
    with pq.ParquetWriter(path, schema) as writer:
        for begin in range(0, rows, _GROUP_ROWS):
            end = min(begin + _GROUP_ROWS, rows)
            arrays = [array for read in readers for array in read(begin, end)]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema), _GROUP_ROWS)


def _reader(column: _Column, verifier: Verifier) -> Callable[[int, int], list[pa.Array]]:
    """Returns a function that reads rows of a file."""
    content = map_file(column.path, np.uint8)
    check, width = verifier.open(column.path), column.dtype.itemsize

    def read(begin: int, end: int) -> list[pa.Array]:
        if check is not None:
            check.touch(begin * width, end * width)
        rows = np.frombuffer(content[begin * width : end * width].data, column.dtype)
        if column.expected and (wrong := (rows < 0) | (rows > column.most)).any():
            row = int(wrong.argmax())
            raise ValueError(
                f"{column.path}: row {begin + row}: expected {column.expected}, got {rows[row]}"
            )
        return [column.decode(values) for values in rows.reshape(len(rows), -1).T]

    return read


def _booleans(labels: np.ndarray) -> pa.Array:
    return pa.array(labels.view(bool))


def _numbers(numbers: np.ndarray) -> pa.Array:
    return pa.array(numbers.astype(np.float32))


def _cast(kind: pa.DataType, values: np.ndarray) -> pa.Array:
    return pa.array(values).cast(kind)


def _decoder(fitted: Transform, table: int) -> tuple[pa.DataType, Decode]:
    """Returns the type of a table's values, and a function from ids to values."""
    place = fitted.dictionary_of[table]
    fitted.check(place)
    dictionary = fitted.dictionaries[place]
    if dictionary.kind == "id":
        return pa.int64(), lambda ids: pa.array(ids.astype(np.int64))
    if dictionary.kind == "hexadecimal":
        kind, decode = pa.large_string(), partial(_hexadecimal, dictionary)
    elif dictionary.kind == "integer":
        kind, decode = pa.int64(), partial(_integers, dictionary)
    else:
        kind = pa.large_string()
        decode = partial(_texts, dictionary, fitted.fields[table].column)
    return kind, partial(_decoded, len(dictionary), decode)


def _decoded(own_ids: int, decode: Decode, ids: np.ndarray) -> pa.Array:
    """Returns the values of ids from 1 to `own_ids`, and null for others; looks each up once."""
    has_value = (ids > 0) & (ids <= own_ids)
    distinct, inverse = np.unique(ids[has_value].astype(np.int64), return_inverse=True)
    places: np.ndarray = np.zeros(len(ids), np.int64)
    places[has_value] = inverse
    return decode(distinct).take(pa.array(places, mask=~has_value))


def _hexadecimal(dictionary: Dictionary, ids: np.ndarray) -> pa.Array:
    keys = dictionary.keys[ids - 1]
    shifts = np.arange(60, -1, -4, dtype=np.uint64)
    nibbles = (keys.astype(np.uint64)[:, None] >> shifts) & np.uint64(15)
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)[nibbles.astype(np.intp)]
    longer = np.uint64(16) ** np.arange(_FEWEST_DIGITS, 16, dtype=np.uint64)
    lengths = _FEWEST_DIGITS + np.searchsorted(longer, keys.astype(np.uint64), side="right")
    kept = digits[np.arange(16) >= (16 - lengths)[:, None]]
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    content = pa.py_buffer(kept.tobytes())
    return pa.LargeStringArray.from_buffers(len(keys), pa.py_buffer(ends), content)


def _integers(dictionary: Dictionary, ids: np.ndarray) -> pa.Array:
    return pa.array(dictionary.keys[ids - 1].astype(np.uint64).view(np.int64))


def _texts(dictionary: Dictionary, column: str, ids: np.ndarray) -> pa.Array:
    """Returns texts of ascending ids; those after the first are taken from the mapped files."""
    ends: Any = dictionary.ends
    later = text_array(ends, dictionary.texts) if len(ends) else pa.array([], pa.large_binary())
    texts = later.take(pa.array(ids[ids > 1] - 2))
    if len(ids) and ids[0] == 1:
        first = dictionary.texts[: ends[0]].tobytes()  # type: ignore[index]
        texts = pa.concat_arrays([pa.array([first], pa.large_binary()), texts])
    try:
        return texts.cast(pa.large_string())
    except pa.ArrowInvalid:
        raise ValueError(
            f"column {column}: a value is not UTF-8, in which Parquet has texts; --values ids "
            "writes ids"
        ) from None
