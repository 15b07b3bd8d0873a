"""Columns besides a model's inputs: a group for each row, such as a user, a weight, and a time.

Each is a file of its own, or a column of a dataset or a table.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dlrm.data.schema.schema import Schema
from dlrm.metrics.ranked import check_weights

_NPY = ".npy"
# Columns of a dataset:
_DTYPES: dict[str, np.dtype] = {
    "weight": np.dtype("<f4"),
    "time": np.dtype("<i8"),
}
_GROUP_DTYPE = np.dtype("<u8")
_FILES = {"groups": "group_*.bin", "weights": "weight.bin"}


@dataclass(frozen=True)
class Columns:
    """Locations of the columns of some rows.

    Attributes:
        files: "groups", "weights" or "times" -> their file.
        schema: schema of tables, which names the columns without a file; None for other rows.
    """

    files: dict[str, Path]
    schema: Schema | None = None

    def groups(self, read: Mapping[str, np.ndarray], rows: int) -> np.ndarray | None:
        """Returns a group for each row, as integers, or None if not requested.

        Args:
            read: columns of tables by their names in a dataset.
        """
        if "groups" in self.files:
            return read_groups(self.files["groups"], rows)
        return next((read[name] for name in read if name.startswith("group_")), None)

    def weights(self, read: Mapping[str, np.ndarray], rows: int) -> np.ndarray | None:
        """Returns a weight for each row, or None if not requested; see `groups`."""
        if "weights" in self.files:
            return read_weights(self.files["weights"], rows)
        return read.get("weight")

    def times(self, read: Mapping[str, np.ndarray], rows: int) -> np.ndarray | None:
        """Returns microseconds since 1970 in UTC, or None if not requested."""
        if "times" in self.files:
            return _read(self.files["times"], rows, "--slices day:")
        return read.get("time")


def of_dataset(
    split: Path, schema: Schema | None, groups: str | None, weights: str | None, times: bool
) -> Columns:
    """Returns the locations of the columns of a dataset's split.

    Args:
        split: directory of the split's files.
        schema: schema of the dataset, if it was made from a table.
        groups: a file, or a column that the schema names as groups; None for none.
        weights: a file, or `weight` or the name of the schema's column; None for none.

    Raises:
        FileNotFoundError: neither a file nor a column of the dataset has that name.
    """
    weight_names = ("weight", schema.weight) if schema else ("weight",)
    weight = "weight" if weights in weight_names else None
    wanted = {"groups": (groups, groups and f"group_{groups}"), "weights": (weights, weight)}
    files = {}
    for flag, (name, column) in wanted.items():
        if name is None:
            continue
        own = split / f"{column}.bin"
        if not Path(name).is_file() and not (column and own.is_file()):
            known = sorted(path.stem.removeprefix("group_") for path in split.glob(_FILES[flag]))
            has = f"has {', '.join(known) or 'none'}" if split.is_dir() else "does not exist"
            raise FileNotFoundError(
                f"--{flag} {name}: expected a file, or {flag} of {split}, which {has}"
            )
        files[flag] = Path(name) if Path(name).is_file() else own
    if times:
        files["times"] = split / "time.bin"
        if not files["times"].is_file():
            raise FileNotFoundError(
                f"--slices day: expected rows with a time, got {split}, whose schema names none"
            )
    return Columns(files)


def of_table(schema: Schema, groups: str | None, weights: str | None, times: bool) -> Columns:
    """Returns the locations of the columns of a table's rows.

    Args:
        groups: a file, or a column of the table; None for none.
        weights: a file, or a column of the table; `weight` is the schema's, if it has one.

    Raises:
        ValueError: the schema names no time.
    """
    given = {"groups": groups, "weights": weights}
    files = {flag: Path(name) for flag, name in given.items() if name and Path(name).is_file()}
    for flag, name in given.items():
        if name and flag not in files and os.sep in name:
            raise FileNotFoundError(f"{name}: no such file (--{flag})")
    if times and schema.time is None:
        raise ValueError(
            "--slices day: expected rows with a time, but the schema of the model names none"
        )
    weight = schema.weight if weights == "weight" and schema.weight else weights
    wanted = replace(
        schema,
        groups=(groups,) if groups and "groups" not in files else (),
        weight=weight if "weights" not in files else None,
        time=schema.time if times else None,
    )
    return Columns(files, wanted)


def of_files(groups: str | None, weights: str | None, times: bool) -> Columns:
    """Returns the locations of the columns of a log's rows.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: times are requested, which logs do not have.
    """
    files = {f: Path(n) for f, n in (("groups", groups), ("weights", weights)) if n}
    for flag, path in files.items():
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file (--{flag})")
    if times:
        raise ValueError(
            "--slices day: expected rows of a table with a time, got a log; rows of several logs "
            "are sliced by file"
        )
    return Columns(files)


def read_groups(path: str | os.PathLike, rows: int) -> np.ndarray:
    """Reads a group for each row, as integers; texts are numbered alphabetically.

    Args:
        path: `.npy` of integers or texts, a text file with one group per line, or a dataset's file.

    Raises:
        ValueError: it has another number of rows, or no column of groups.
    """
    column = _read(path, rows, "--groups")
    if column.dtype.kind in "iu":
        return column
    if column.dtype.kind != "U":
        raise ValueError(f"--groups {path}: expected integers or texts, got {column.dtype}")
    return np.unique(column, return_inverse=True)[1]


def read_weights(path: str | os.PathLike, rows: int) -> np.ndarray:
    """Reads a weight for each row, float64.

    Args:
        path: `.npy` of numbers, a text file with one number per line, or a dataset's file.

    Raises:
        ValueError: it has another number of rows, a row that is not a number of 0 or more, or
            weights that cannot be summed.
    """
    column = _read(path, rows, "--weights")
    if column.dtype.kind == "U":
        column = _numbers(column, path)
    if column.dtype.kind not in "iuf":
        raise ValueError(f"--weights {path}: expected numbers, got {column.dtype}")
    column = column.astype(np.float64)
    try:
        check_weights(column)
    except ValueError as error:
        raise ValueError(f"--weights {path}: {error}") from None
    return column


def _read(path: str | os.PathLike, rows: int, flag: str) -> np.ndarray:
    path = Path(path)
    if path.suffix == ".bin":
        column = np.fromfile(path, _DTYPES.get(path.stem, _GROUP_DTYPE))
    elif path.suffix == _NPY:
        try:
            column = np.load(path, allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{flag} {path}: not a .npy file ({error})") from None
    else:
        try:
            column = np.array(path.read_text(encoding="utf-8").splitlines(), str)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{flag} {path}: expected text in UTF-8, got the byte {error.object[error.start]} "
                f"at {error.start}"
            ) from None
    if column.shape != (rows,):
        got = f"{len(column):,}" if column.ndim == 1 else str(list(column.shape))
        raise ValueError(f"{flag} {path}: expected one value for each of {rows:,} rows, got {got}")
    return column


def _numbers(column: np.ndarray, path: Path | str | os.PathLike) -> np.ndarray:
    values = np.empty(len(column))
    for row, text in enumerate(column.tolist()):
        try:
            values[row] = float(text)
        except ValueError:
            raise ValueError(
                f"--weights {path}, row {row}: expected a number, got {text!r}"
            ) from None
    return values
