"""A column beside the rows: a group, such as a user, or a weight for each.

It is a file of its own, or one of a dataset whose schema has groups or weights.
"""

import os
from pathlib import Path

import numpy as np

_NPY = ".npy"


def of_dataset(split: Path, flag: str, name: str) -> Path | None:
    """Returns the file of a column of a dataset's split, where it has one of that name.

    Args:
        split: directory of the split's files.
        flag: "groups" or "weights".
        name: what the flag says: the column of the groups, or `weight`.
    """
    path = split / ("weight.bin" if flag == "weights" else f"group_{name}.bin")
    asked = flag == "groups" or name == "weight"
    return path if asked and not Path(name).exists() and path.is_file() else None


def read_groups(path: str | os.PathLike, rows: int) -> np.ndarray:
    """Reads a group for each row, as integers; texts are numbered in the order of the alphabet.

    Args:
        path: `.npy` of integers or texts, a text file of a group a line, or a dataset's file.
        rows: how many there must be.

    Raises:
        FileNotFoundError: there is no such file.
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
        path: `.npy` of numbers, a text file of a number a line, or a dataset's file.
        rows: how many there must be.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it has another number of rows, or a row that is no number of 0 or more.
    """
    column = _read(path, rows, "--weights")
    if column.dtype.kind == "U":
        column = _numbers(column, path)
    if column.dtype.kind not in "iuf":
        raise ValueError(f"--weights {path}: expected numbers, got {column.dtype}")
    column = column.astype(np.float64)
    good = np.isfinite(column) & (column >= 0)
    if not good.all():
        row = int(good.argmin())
        raise ValueError(
            f"--weights {path}, row {row}: expected a finite number of 0 or more, got {column[row]}"
        )
    if rows and not column.any():
        raise ValueError(f"--weights {path}: expected a weight above 0, got {rows:,} zeros")
    return column


def _read(path: str | os.PathLike, rows: int, flag: str) -> np.ndarray:
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file ({flag})")
    if path.suffix == ".bin":
        column = np.fromfile(path, np.dtype("<f4" if path.name == "weight.bin" else "<u8"))
    elif path.suffix == _NPY:
        try:
            column = np.load(path, allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{flag} {path}: not a .npy file ({error})") from None
    else:
        column = np.array(path.read_text(encoding="utf-8").splitlines(), str)
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
