"""Names, dtypes and manifest of a split-binary dataset: one file per feature, no headers.

    DATASET/feature_spec.yaml  model_size.json  manifest.json
    DATASET/train/label.bin numerical.bin cat_0.bin cat_1.bin ...   (the same in test/, validation/)

Row k of every file belongs to sample k: a label is one byte (0 or 1), a numerical row is float16
`[num_numerical]`, an id is a signed integer as narrow as the table's cardinality allows. This is
the layout of NVIDIA's DLRM. Only numpy and the standard library are imported, so that preprocessing
and serving run without torch.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data.names import (
    CONVERTED as CONVERTED,
    FEATURE_SPEC as FEATURE_SPEC,
    KIND as KIND,
    LABEL as LABEL,
    LABEL_FILE as LABEL_FILE,
    MAX_CARDINALITY as MAX_CARDINALITY,
    MODEL_SIZE as MODEL_SIZE,
    NUMERICAL_FILE as NUMERICAL_FILE,
    SPLITS as SPLITS,
    TRANSFORM as TRANSFORM,
    WEIGHT_FILE as WEIGHT_FILE,
    categorical_name as categorical_name,
    check_spec_name as check_spec_name,
    default_names as default_names,
    field_names as field_names,
    field_of as field_of,
    numerical_name as numerical_name,
)
from dlrm.documents import brief, read_json
from dlrm.files import MANIFEST, write_atomically
from dlrm.manifest import read_manifest, write_manifest
from dlrm.mapped_files import map_file

LABEL_DTYPE = np.dtype(bool)
NUMERICAL_DTYPE = np.dtype(np.float16)
WEIGHT_DTYPE = np.dtype("<f4")
_FIRST_CRITEO_COLUMN = 14  # model_size.json calls the tables _c14, _c15, ... whatever the dataset


def id_dtype(cardinality: int) -> np.dtype:
    """Returns the narrowest dtype for ids in [0, cardinality); NVIDIA's rule, strictly less than.

    Raises:
        ValueError: a table of 2**31 - 1 rows or more.
    """
    for dtype in (np.int8, np.int16, np.int32):
        if cardinality < np.iinfo(dtype).max:
            return np.dtype(dtype)
    raise ValueError(f"cardinality {cardinality}: expected at most {MAX_CARDINALITY}")


def row_dtypes(num_numerical: int, cardinalities: Sequence[int]) -> dict[str, np.dtype]:
    """File of a split -> dtype of its rows, under the default file names."""
    files: dict[str, np.dtype] = {LABEL_FILE: LABEL_DTYPE}
    if num_numerical:
        files[NUMERICAL_FILE] = np.dtype((NUMERICAL_DTYPE, (num_numerical,)))
    return files | {categorical_name(i): id_dtype(n) for i, n in enumerate(cardinalities)}


def map_rows(
    path: Path,
    dtype: np.dtype,
    shape: tuple[int, ...],
    what: str = "rows, as the label file has,",
) -> np.ndarray:
    """Returns an array over a file.

    Args:
        what: items along the first dimension, for messages.

    Raises:
        FileNotFoundError, ValueError: the file is missing, or has another size than `shape` needs.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: missing")
    rows, width = shape[0], dtype.itemsize * math.prod(shape[1:])
    if (size := path.stat().st_size) != rows * width:
        raise ValueError(
            f"{path}: expected {rows * width} bytes ({rows} {what} of {width} bytes), got {size}"
        )
    return map_file(path, dtype, shape)


def map_binary_rows(path: Path, num_numerical: int, num_tables: int, flag: str) -> np.ndarray:
    """Returns the rows of a file of NVIDIA's "binary" datasets, little-endian words of four bytes.

    They are the label as int32, the numericals as float32 (already transformed), the ids as int32.

    Args:
        flag: the flag of `num_numerical`, which the file does not state, for messages.

    Raises:
        FileNotFoundError, ValueError: the file is missing, or has no whole number of rows.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: missing")
    width, size = 1 + num_numerical + num_tables, path.stat().st_size
    if size % (4 * width):
        raise ValueError(
            f"{path}: expected a multiple of {4 * width} bytes (a label, {num_numerical} numerical "
            f"and {num_tables} categorical features of 4 bytes each), got {size}: truncated, or "
            f"{flag} is wrong"
        )
    return map_file(path, np.dtype("<i4"), (size // (4 * width), width))


def one_class_note(split: str, rows: int, clicks: int) -> str | None:
    """Returns a note that a split with only one label has no AUC; None if it has both labels."""
    if not rows or 0 < clicks < rows:
        return None
    return f"note: {split}: all {rows:,} labels are {int(clicks > 0)}, so no AUC can be computed"


def write_model_size(directory: Path, cardinalities: Sequence[int], name: str = MODEL_SIZE) -> None:
    """Writes `model_size.json`: the greatest id of each table, its cardinality minus one."""
    sizes = {f"_c{_FIRST_CRITEO_COLUMN + i}": n - 1 for i, n in enumerate(cardinalities)}
    write_atomically(directory / name, json.dumps(sizes, indent=4) + "\n")


def read_model_size(directory: Path) -> list[int]:
    """Reads `model_size.json` and returns the cardinalities in table order.

    Raises:
        ValueError: it is not an object of non-negative integers; the file and the entry are named.
    """
    path = directory / MODEL_SIZE
    sizes = read_json(path)
    for name, size in sizes.items():
        if type(size) is not int or size < 0:
            raise ValueError(
                f"{path}: entry {name}: expected a greatest id of 0 or more, got {brief(size)}"
            )
    return [size + 1 for size in sizes.values()]


def write_dataset_manifest(
    directory: Path,
    rows: dict[str, int],
    cardinalities: Sequence[int],
    transform: dict[str, Any],
    checksums: dict[str, str] | None = None,
) -> None:
    """Writes `manifest.json`, last: a dataset without it is unfinished and refused by readers.

    Args:
        rows: number of samples of each split.
        cardinalities: rows of each table, in feature order.
        transform: options of preprocessing that affect the data, such as the frequency limit.
        checksums: known checksums of files, by relative path.
    """
    facts = {"rows": rows, "cardinalities": list(cardinalities), "transform": transform}
    write_manifest(directory, KIND, checksums, **facts)


def read_dataset_manifest(directory: Path, allow_links: bool = False) -> dict[str, Any] | None:
    """Checks a dataset against its manifest; returns None if other software wrote it without one.

    Our datasets are written to a staging directory and renamed when complete, so a dataset without
    a manifest can only be NVIDIA's; readers check its sizes against the feature specification.

    Raises:
        FileNotFoundError, ValueError: it does not match the files.
    """
    if not (directory / MANIFEST).exists():
        return None
    return read_manifest(directory, KIND, allow_links=allow_links)
