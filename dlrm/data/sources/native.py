"""The compiled host code of `csrc/host`: parsers of text, and the lookup of ids.

`dlrm._host` is a module for the Python that built it. `dlrm/_served.so` has what a served model
calls to read raw rows, behind a C interface, as its server may have another Python; the exporter
copies both into the model repository. Where they cannot be loaded, NumPy computes the same.
"""

import ctypes
import importlib
import importlib.util
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_SERVED = Path(__file__).resolve().parents[2] / "_served.so"
NOTHING, TEXTS, DISTINCT, NUMBERS = range(4)  # what to keep of a column, as in text_cells.h
ROWS, UNDECIDED = 0, 2  # what is in a block, as in text_cells.h
NUMBER, OTHER_NUMBER = 1, 2  # tags of JSON's numbers, as in json_block.h


class Texts(NamedTuple):
    """A column of cells of text.

    Attributes:
        codes: the index of each cell's text, or -1 for a missing one; None if the texts are all
            cells.
        offsets: begins of the texts in `data`, and the end of the last.
        data: the texts, one after another.
        tags: of distinct texts, 0, or `NUMBER` or `OTHER_NUMBER` of JSON.
    """

    codes: np.ndarray | None
    offsets: np.ndarray
    data: np.ndarray
    tags: np.ndarray


class TextBlock(NamedTuple):
    """The cells of a block of lines.

    Attributes:
        outcome: `ROWS`; `UNDECIDED` if the block has something that only the caller can decide; or
            another number if rows have a wrong number of cells. The rest has a meaning for `ROWS`
            alone.
        lines: the line of each row, from 1.
        num_lines: number of lines.
        names: of JSON, the names of all columns, in the order of `columns` and then of others.
        columns: the columns: texts; numbers, of which NaN is a missing one; or None if nothing is
            kept.
    """

    outcome: int
    lines: np.ndarray
    num_lines: int
    names: list[str]
    columns: list[Texts | np.ndarray | None]


def read_csv(
    text: bytes, delimiter: str, quote: str | None, longest_line: int, keep: Sequence[int]
) -> TextBlock:
    """Splits a block of whole lines of CSV, each of which should be a row.

    Quotes may stand around whole cells, in which they are doubled. A blank line is no row.

    Args:
        text: the block, without lone returns.
        delimiter, quote: characters of ASCII; `quote` may be None.
        longest_line: bytes of a line that leave the block undecided.
        keep: what to keep of each column: `NOTHING`, `TEXTS`, `DISTINCT` or `NUMBERS`. The last
            keeps `TEXTS` if a cell has another text than those of usual numbers.
    """
    return _block(*host.read_csv(text, delimiter, quote, longest_line, keep))


def read_json(text: bytes, names: Sequence[str], keep: Sequence[int]) -> TextBlock:
    """Reads a block of JSON lines, maps of columns to values; missing values have no text.

    Args:
        text: the block, in UTF-8 and without lone returns.
        names: columns; others are found in the text.
        keep: what to keep of each of these: `NOTHING`, `DISTINCT` or `NUMBERS`. The last keeps
            `DISTINCT` if a cell has another text than those of usual numbers.
    """
    return _block(*host.read_json(text, names, keep))


def _block(
    outcome: int, lines: np.ndarray, num_lines: int, names: list[str], columns: list[Any]
) -> TextBlock:
    texts = [Texts(*column) if isinstance(column, tuple) else column for column in columns]
    return TextBlock(outcome, lines, num_lines, names, texts)


class Lookups:
    """Lookups of ids in the form that `encode_fields` takes.

    Args:
        lookups: each an `IdLookup`; references are kept.
    """

    def __init__(self, lookups: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> None:
        self._lookups = list(lookups)
        self.views = np.zeros((len(self._lookups), 5), np.int64)
        for view, (hashes, ids, directory) in zip(self.views, self._lookups, strict=True):
            view[:3] = [array.ctypes.data for array in (hashes, ids, directory)]
            view[3:] = directory.size, ids.itemsize

    def __reduce__(self) -> tuple[type["Lookups"], tuple[Any]]:
        """Makes copies from the arrays, since addresses hold in one process only."""
        return Lookups, (self._lookups,)


def encode_fields(
    data: np.ndarray, starts: np.ndarray, ends: np.ndarray, num_numerical: int, lookups: Lookups
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int | None]:
    """Parses fields `data[starts[column, row]:ends[column, row]]`, and looks up the ids of hashes.

    Columns of integers come first, then one of hashes for each lookup.

    Returns:
        The integers and a mask of missing ones, `[num_numerical, rows]`; the ids, `[rows,
        lookups]`; and `row * columns + column` of the first unreadable field, or None. If there is
        one, the rest is without meaning.
    """
    assert served is not None
    (columns, rows), num_tables = starts.shape, len(lookups.views)
    if ends.shape != starts.shape or not 0 <= num_numerical == columns - num_tables:
        raise ValueError(
            f"sizes do not fit: expected starts and ends of {num_numerical} integers and "
            f"{num_tables} hashes, got {list(starts.shape)} and {list(ends.shape)}"
        )
    values, missing = np.empty((columns, rows), np.int64), np.empty((columns, rows), bool)
    ids = np.empty((rows, num_tables), np.int32)
    bad_at = served(
        *(_pointer(data, np.uint8), data.size, _pointer(starts, np.int64)),
        *(_pointer(ends, np.int64), num_numerical, num_tables, rows),
        *(array.ctypes.data for array in (lookups.views, values, missing, ids)),
    )
    return values[:num_numerical], missing[:num_numerical], ids, None if bad_at < 0 else bad_at


def _pointer(array: np.ndarray, dtype: type) -> int:
    if array.dtype != dtype or not array.flags.c_contiguous:
        expected = np.dtype(dtype)
        raise ValueError(f"expected an array of {expected} in one piece, got {array.dtype}")
    return array.ctypes.data


def _prototype() -> Callable[..., int]:
    """Returns the function of `csrc/host/served.cpp`."""
    function = ctypes.CDLL(str(_SERVED)).dlrm_encode_fields
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    function.argtypes = [pointer, number, pointer, pointer, *[number] * 3, *[pointer] * 4]
    function.restype = number
    return function


def _load(built: bool, load: Callable[[], Any]) -> tuple[Any, str]:
    """Returns what a library has, or None and the reason."""
    if not built:
        return None, "it was not built"
    try:
        return load(), ""
    except (ImportError, OSError, AttributeError) as error:  # of another machine or version
        logging.getLogger(__name__).warning(
            "numpy parses rows instead of the native parser of dlrm, several times slower: %s",
            error,
        )
        return None, str(error)


# None where numpy is used instead.
host, _ = _load(
    importlib.util.find_spec("dlrm._host") is not None,
    lambda: importlib.import_module("dlrm._host"),
)
served, why_not_served = _load(_SERVED.is_file(), _prototype)
