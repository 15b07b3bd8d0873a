"""The compiled host code of `csrc/host`: parsers of text, and the lookup of ids.

`dlrm._host` is a module for the Python that built it. `dlrm/_served.so` has what a served model
calls to read raw rows, behind a C interface, as its server may have another Python; the exporter
copies both into the model repository. Where they cannot be loaded, NumPy looks up ids and reads
what a server is sent, and files of text are refused.
"""

import ctypes
import importlib.util
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple
from zipimport import zipimporter

import numpy as np

_PACKAGE = Path(__file__).resolve().parents[2]
NOTHING, TEXTS, DISTINCT, NUMBERS = range(4)  # what to keep of a column, as in text_cells.h
# What is in a block, as in text_cells.h.
ROWS, UNDECIDED, PARTIAL, UNCLOSED, AFTER_QUOTE, MANY_LINES = range(6)
NUMBER, OTHER_NUMBER = 1, 2  # tags of JSON's numbers, as in json_block.h


class Texts(NamedTuple):
    """A column of cells of text, which are `data[offsets[i]:offsets[i + 1]]`.

    Attributes:
        codes: the index of each cell's text, or -1 for a missing one; None if the texts are cells.
        tags: of distinct texts, 0, or `NUMBER` or `OTHER_NUMBER` of JSON.
    """

    codes: np.ndarray | None
    offsets: np.ndarray
    data: np.ndarray
    tags: np.ndarray


Column = Texts | np.ndarray | None  # texts; numbers, of which NaN is missing; or nothing


class CsvBlock(NamedTuple):
    """The rows of a block of CSV.

    Attributes:
        outcome: `ROWS`, or what ended the reading, from `UNDECIDED` on.
        lines: the line on which each row ends, from 1.
        num_lines: number of lines of `consumed` bytes.
        failed_lines: number of lines of the row that ended the reading.
        blank: the first blank line, which is no row; 0 without one.
        bad: rows with another number of cells, which are empty in the columns: the index of the
            row, the number, and the text.
        spans: the number of rows of several lines, that of their lines, and the first line.
    """

    outcome: int
    lines: np.ndarray
    num_lines: int
    columns: list[Column]
    consumed: int
    failed_lines: int
    blank: int
    bad: list[tuple[int, int, str]]
    spans: tuple[int, int, int]


class CsvHead(NamedTuple):
    """The first row of a block of CSV, whose first line is not blank; see `CsvBlock`."""

    outcome: int
    cells: list[str]
    num_lines: int
    consumed: int
    failed_lines: int


class Marks(NamedTuple):
    """The characters of a CSV, all of ASCII."""

    delimiter: str
    quote: str | None = None
    escape: str | None = None

    @property
    def codes(self) -> list[int]:
        """Returns them as `dlrm._host` takes them."""
        return [-1 if mark is None else ord(mark) for mark in self]


def read_csv(
    text: bytes, marks: Marks, plain: bool, lines: bool, last: bool, keep: Sequence[int]
) -> CsvBlock:
    """Splits a block of whole lines of CSV.

    Args:
        text: the block, in UTF-8.
        plain: whether it has neither escapes nor returns that no line feed follows.
        lines: leave blocks undecided in which a row has several lines, or quotes within a cell.
        last: whether nothing follows.
        keep: what to keep of each column: `NOTHING`, `TEXTS`, `DISTINCT` or `NUMBERS`. The last
            keeps `TEXTS` if a cell has another text than those of usual numbers. If all are
            `NOTHING`, rows are only counted, with any number of cells.
    """
    outcome, ends, num_lines, columns, *others = compiled().read_csv(
        text, *marks.codes, plain, lines, last, keep
    )
    return CsvBlock(outcome, ends, num_lines, _columns(columns), *others)


def read_csv_head(text: bytes, marks: Marks, last: bool) -> CsvHead:
    """Reads the first row of a block; see `read_csv`."""
    return CsvHead(*compiled().read_csv_head(text, *marks.codes, last))


class JsonBlock(NamedTuple):
    """The rows of a block of JSON lines.

    Attributes:
        decided: whether the rest has a meaning.
        lines: the line of each row, from 1.
        names: the names of all columns, in the order of `columns`.
    """

    decided: bool
    lines: np.ndarray
    num_lines: int
    names: list[str]
    columns: list[Column]


def read_json(text: bytes, names: Sequence[str], keep: Sequence[int]) -> JsonBlock:
    """Reads a block of JSON lines, maps of columns to values; missing values have no text.

    Args:
        text: the block, in UTF-8 and without lone returns.
        names: columns; others are found in the text.
        keep: what to keep of each of these: `NOTHING`, `DISTINCT` or `NUMBERS`. The last keeps
            `DISTINCT` if a cell has another text than those of usual numbers.
    """
    decided, lines, num_lines, every, columns = compiled().read_json(text, names, keep)
    return JsonBlock(decided, lines, num_lines, every, _columns(columns))


def _columns(columns: list[Any]) -> list[Column]:
    return [Texts(*column) if isinstance(column, tuple) else column for column in columns]


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
    for array, dtype in ((data, np.uint8), (starts, np.int64), (ends, np.int64)):
        if array.dtype != dtype or not array.flags.c_contiguous:
            expected = np.dtype(dtype)
            raise ValueError(f"expected an array of {expected} in one piece, got {array.dtype}")
    values, missing = np.empty((columns, rows), np.int64), np.empty((columns, rows), bool)
    ids = np.empty((rows, num_tables), np.int32)
    text, *others = (
        array.ctypes.data for array in (data, starts, ends, lookups.views, values, missing, ids)
    )
    sizes = num_numerical, num_tables, rows
    bad_at = served(text, data.size, *others[:2], *sizes, *others[2:])
    return values[:num_numerical], missing[:num_numerical], ids, None if bad_at < 0 else bad_at


def _served() -> Callable[..., int] | None:
    """Returns the function of `csrc/host/served.cpp`; None if it was not built."""
    if not (library := _PACKAGE / "_served.so").is_file():
        return None
    function = ctypes.CDLL(str(library)).dlrm_encode_fields
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    function.argtypes = [pointer, number, pointer, pointer, *[number] * 3, *[pointer] * 4]
    function.restype = number
    return function


def _host() -> Any:
    """Returns the module `dlrm._host` beside this code; None if it was not built.

    A copy of the package, as in a served model, never takes that of an installed one. From an
    archive, as Spark's `--py-files` sends it, the module is loaded from a copy.
    """
    if spec := PathFinder.find_spec("dlrm._host", [str(_PACKAGE)]):
        return _module(spec)
    archive = None if __spec__ is None else __spec__.loader
    if not isinstance(archive, zipimporter):
        return None
    for ending in EXTENSION_SUFFIXES:
        with suppress(OSError), NamedTemporaryFile(suffix=ending) as file:
            file.write(archive.get_data(f"dlrm/_host{ending}"))
            file.flush()
            return _module(importlib.util.spec_from_file_location("dlrm._host", file.name))
    return None


def _module(spec: ModuleSpec | None) -> Any:
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def _load(load: Callable[[], Any]) -> tuple[Any, str]:
    """Returns what a library has, or None and the reason."""
    try:
        library = load()
        return library, "" if library else "it was not built"
    except (ImportError, OSError, AttributeError) as error:  # of another machine or version
        logging.getLogger(__name__).warning(
            "Python works in place of a compiled library of dlrm, many times slower: %s", error
        )
        return None, str(error)


# None where Python looks up and parses what a server is sent.
host, why_no_host = _load(_host)
served, why_not_served = _load(_served)


def compiled() -> Any:
    """Returns `host`, which files are read with.

    Raises:
        ValueError: it is missing.
    """
    if host is None:
        raise ValueError(
            f"expected the compiled dlrm._host, which reads logs, CSV and JSON lines: {why_no_host}"
            "; `dlrm doctor` says how it is built"
        )
    return host
