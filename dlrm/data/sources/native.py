"""The compiled host code, `dlrm/_host.so` of `csrc/host`: parsers of text, and the lookup of ids.

The library has a plain C interface, so one file works with every Python; the exporter copies
it into the model repository. Types and sizes are checked here, before pointers are passed.
"""

import ctypes
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

LIBRARY = Path(__file__).resolve().parents[2] / "_host.so"
_VERSION = 5  # of the interface, as in csrc/host/host.cpp
NOTHING, TEXTS, DISTINCT, NUMBERS = range(4)  # what to keep of a column, as in text_cells.h
ROWS, WIDTHS, UNDECIDED, _NO_MEMORY = range(4)  # what is in a block, as in text_cells.h
NUMBER, OTHER_NUMBER = 1, 2  # tags of JSON's numbers, as in json_block.h
_Place, _Pointer = ctypes.c_int64, ctypes.c_void_p
_BOOL, _UINT8, _INT64, _UINT64 = map(np.dtype, (np.bool_, np.uint8, np.int64, np.uint64))
_FLOAT = np.dtype(np.float32)


class _ParsedLines(ctypes.Structure):
    _fields_ = [
        *((name, _Place) for name in ("num_numerical", "num_categorical", "labeled", "capacity")),
        *((name, _Pointer) for name in ("labels", "integers", "hashes", "missing")),
        ("parsed", _Place),
    ]


class _Fields(ctypes.Structure):
    _fields_ = [
        *(("data", _Pointer), ("size", _Place), ("starts", _Pointer), ("ends", _Pointer)),
        *((name, _Place) for name in ("num_numerical", "columns", "rows")),
    ]


class _Table(ctypes.Structure):
    _fields_ = [
        *((name, _Pointer) for name in ("hashes", "ids", "directory")),
        *((name, _Place) for name in ("places", "id_bytes")),
    ]


class ParsedText(NamedTuple):
    """Numbers of the first `rows` lines; arrays have room for all lines, `[columns, lines]`.

    `bad_at` is the start of the first unreadable line, or None.
    """

    labels: np.ndarray
    integers: np.ndarray
    hashes: np.ndarray
    missing: np.ndarray
    rows: int
    bad_at: int | None


class Texts(NamedTuple):
    """A column of cells of text.

    Attributes:
        codes: the index of each cell's text, or -1 for a missing one; None if the texts are all
            cells.
        offsets: begins of the texts in `data`, and the end of the last.
        data: the texts, one after another.
        tags: of texts of JSON, 0, `NUMBER` or `OTHER_NUMBER`; otherwise 0.
    """

    codes: np.ndarray | None
    offsets: np.ndarray
    data: np.ndarray
    tags: np.ndarray


class TextBlock(NamedTuple):
    """The cells of a block of lines.

    Attributes:
        outcome: `ROWS`; `WIDTHS` if every row is a line, but some have another number of cells; or
            `UNDECIDED` if the block has something else. The rest has a meaning for `ROWS` alone.
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


class Tables:
    """Tables of ids in the form that the library takes.

    Args:
        tables: hashes, ids and directory of each, as in `IdLookup`; references are kept.
    """

    def __init__(self, tables: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> None:
        self._arrays = list(tables)
        self.id_dtypes = [ids.dtype for _, ids, _ in tables]
        self.views = (_Table * len(tables))(*(_view(*arrays) for arrays in tables))

    def __reduce__(self) -> tuple[type["Tables"], tuple[Any]]:
        """Makes copies from the arrays, since addresses hold in one process only."""
        return Tables, (self._arrays,)


class Host:
    """The functions of the library.

    Raises:
        OSError: the library cannot be loaded, or is of another version.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        version = getattr(library, "dlrm_host_version", None)
        if version is None or version() != _VERSION:
            raise OSError(f"{path}: expected version {_VERSION} of the library, got another")

        def function(name: str, result: type | None, *arguments: type) -> Callable[..., Any]:
            symbol = getattr(library, f"dlrm_{name}")
            symbol.restype, symbol.argtypes = result, arguments
            return symbol

        pair = (_Pointer, _Pointer)
        self._count_lines = function("count_lines", _Place, ctypes.c_char_p, _Place)
        self._parse_lines = function("parse_lines", _Place, ctypes.c_char_p, _Place, _Pointer)
        self._parse_fields = function("parse_fields", _Place, _Pointer, *pair)
        self._look_up = function("look_up", None, _Pointer, _Place, *pair, _Pointer)
        self._look_up_rows = function(
            "look_up_rows", None, _Pointer, _Place, _Place, *pair, _Pointer
        )
        self._hash_texts = function("hash_texts", None, _Pointer, _Place, *pair, _Pointer)
        self._are_numbers = function("are_numbers", None, _Pointer, _Place, *pair, _Pointer)
        self._to_half = function("to_half", _Place, _Pointer, _Place, _Pointer)
        text = (ctypes.c_char_p, _Place)
        csv_format = (_Place, _Place, _Place)
        self._read_csv = function("read_csv", _Pointer, *text, *csv_format, _Place, _Pointer)
        names = (ctypes.c_char_p, _Place)
        self._read_json = function("read_json", _Pointer, *text, *names, _Pointer)
        self._cells_facts = function("cells_facts", None, *pair)
        self._cells_rows = function("cells_rows", None, *pair, _Pointer)
        self._column_facts = function("column_facts", None, *pair)
        self._copy_column = function("copy_column", None, _Pointer, _Place, *pair, *pair)
        self._copy_numbers = function("copy_numbers", None, _Pointer, _Place, _Pointer)
        self._free_cells = function("free_cells", None, _Pointer)

    def parse_lines(
        self, text: bytes, num_numerical: int, num_categorical: int, labeled: bool
    ) -> ParsedText:
        """Parses lines up to the first that cannot be read; see `log_lines.parse_lines`."""
        rows = self._count_lines(text, len(text))
        labels = np.empty(rows, bool)
        integers = np.empty((num_numerical, rows), np.int64)
        hashes = np.empty((num_categorical, rows), np.uint64)
        missing = np.empty((num_numerical + num_categorical, rows), bool)
        arrays = (array.ctypes.data for array in (labels, integers, hashes, missing))
        lines = _ParsedLines(num_numerical, num_categorical, labeled, rows, *arrays, 0)
        bad_at = self._parse_lines(text, len(text), ctypes.addressof(lines))
        place = None if bad_at < 0 else bad_at
        return ParsedText(labels, integers, hashes, missing, lines.parsed, place)

    def parse_fields(
        self, data: np.ndarray, starts: np.ndarray, ends: np.ndarray, num_numerical: int
    ) -> tuple[np.ndarray, np.ndarray, int | None]:
        """Parses fields `data[starts[column, row]:ends[column, row]]`: integers, then hashes.

        Returns:
            The numbers as uint64 `[columns, rows]`, with integers to be viewed as int64; a mask of
            missing ones; and `row * columns + column` of the first unreadable field, after which
            there are no numbers, or None.
        """
        columns, rows = starts.shape
        if not 0 <= num_numerical <= columns:
            raise ValueError(f"num_numerical {num_numerical}: expected 0 to {columns}")
        values, missing = np.empty((columns, rows), np.uint64), np.empty((columns, rows), bool)
        fields = _Fields(
            *(_pointer(data, _UINT8, data.size), data.size),
            *(_pointer(starts, _INT64, starts.size), _pointer(ends, _INT64, starts.size)),
            *(num_numerical, columns, rows),
        )
        bad = self._parse_fields(ctypes.addressof(fields), values.ctypes.data, missing.ctypes.data)
        return values, missing, None if bad < 0 else bad

    def look_up(
        self, values: np.ndarray, missing: np.ndarray, tables: Tables, output: np.ndarray
    ) -> None:
        """Writes the ids of numbers `[rows]` in the first table, in the dtype of `output`."""
        rows = values.size
        if not output.flags.writeable:
            raise ValueError("look_up: expected an output that can be written")
        self._look_up(
            ctypes.addressof(tables.views),
            rows,
            _pointer(values, _UINT64, rows),
            _pointer(missing, _BOOL, rows),
            _pointer(output, tables.id_dtypes[0], rows),
        )

    def look_up_rows(self, values: np.ndarray, missing: np.ndarray, tables: Tables) -> np.ndarray:
        """Returns the ids, int32 `[rows, tables]`, of numbers `[tables, rows]`."""
        count, rows = len(tables.views), values.shape[1]
        ids = np.empty((rows, count), np.int32)
        self._look_up_rows(
            ctypes.addressof(tables.views),
            count,
            rows,
            _pointer(values, _UINT64, count * rows),
            _pointer(missing, _BOOL, count * rows),
            ids.ctypes.data,
        )
        return ids

    def hash_texts(self, data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Returns the uint64 hashes of texts `data[starts[row]:ends[row]]`; see `text_hash.h`."""
        return self._of_texts(self._hash_texts, _UINT64, data, starts, ends)

    def are_numbers(self, data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Returns a mask of texts that are decimal numbers; see `number_text.h`."""
        return self._of_texts(self._are_numbers, _BOOL, data, starts, ends)

    def _of_texts(
        self,
        function: Callable[..., Any],
        dtype: np.dtype,
        data: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
    ) -> np.ndarray:
        rows = starts.size
        if rows and not (starts.min() >= 0 and (starts <= ends).all() and ends.max() <= data.size):
            raise ValueError(f"sizes do not fit: expected texts within {data.size} bytes")
        results = np.empty(rows, dtype)
        function(
            _pointer(data, _UINT8, data.size),
            rows,
            _pointer(starts, _INT64, rows),
            _pointer(ends, _INT64, rows),
            results.ctypes.data,
        )
        return results

    def to_half(self, values: np.ndarray) -> np.ndarray:
        """Returns float32 as float16, for which numpy takes ten times as long."""
        values, halves = np.ascontiguousarray(values), np.empty(values.shape, np.float16)
        if self._to_half(_pointer(values, _FLOAT, values.size), values.size, halves.ctypes.data):
            return halves
        return values.astype(np.float16)

    def read_csv(
        self, text: bytes, delimiter: str, quote: str | None, longest_line: int, keep: Sequence[int]
    ) -> TextBlock:
        """Splits a block of whole lines of CSV, each of which should be a row.

        Quotes may stand around whole cells, in which they are doubled. A blank line is no row.

        Args:
            text: the block, without lone returns.
            delimiter, quote: characters of ASCII; `quote` may be None.
            longest_line: bytes of a line that leave the block undecided.
            keep: what to keep of each column: `NOTHING`, `TEXTS`, `DISTINCT` or `NUMBERS`. The
                last keeps `TEXTS` if a cell has another text than those of usual numbers.
        """
        marks = ord(delimiter), -1 if quote is None else ord(quote), longest_line

        def read(kept: np.ndarray) -> int | None:
            return self._read_csv(text, len(text), *marks, len(kept), kept.ctypes.data)

        return self._read_cells(read, keep, TEXTS)

    def read_json(self, text: bytes, names: Sequence[str], keep: Sequence[int]) -> TextBlock:
        """Reads a block of JSON lines, maps of columns to values; missing values have no text.

        Args:
            text: the block, in UTF-8 and without lone returns.
            names: columns, whose names have no line feed; others are found in the text.
            keep: what to keep of each of these: `NOTHING`, `DISTINCT` or `NUMBERS`. The last keeps
                `DISTINCT` if a cell has another text than those of usual numbers.
        """
        joined = "".join(f"{name}\n" for name in names).encode()

        def read(kept: np.ndarray) -> int | None:
            return self._read_json(text, len(text), joined, len(kept), kept.ctypes.data)

        return self._read_cells(read, keep, DISTINCT)

    def _read_cells(
        self, read: Callable[[np.ndarray], int | None], keep: Sequence[int], otherwise: int
    ) -> TextBlock:
        """Reads a block of cells, once more if columns of `NUMBERS` have others."""
        kept = np.array(keep, np.uint8)
        while True:
            block = self._cells(read(kept), kept)
            pairs = enumerate(zip(kept.tolist(), block.columns, strict=False))
            others = [i for i, (kind, column) in pairs if kind == NUMBERS and column is None]
            if not others:
                return block
            kept[others] = otherwise

    def _cells(self, block: int | None, kept: np.ndarray) -> TextBlock:
        """Copies a block of cells, and frees it."""
        if block is None:
            raise MemoryError
        try:
            facts = np.empty(5, np.int64)
            self._cells_facts(block, facts.ctypes.data)
            outcome, rows, num_lines, columns, name_bytes = facts.tolist()
            if outcome == _NO_MEMORY:
                raise MemoryError
            if outcome != ROWS:
                return TextBlock(outcome, np.empty(0, np.int64), num_lines, [], [])
            lines, names = np.empty(rows, np.int64), np.empty(name_bytes, np.uint8)
            self._cells_rows(block, lines.ctypes.data, names.ctypes.data)
            of_columns = np.empty((columns, 4), np.int64)
            self._column_facts(block, of_columns.ctypes.data)
            made = [
                self._column(block, i, rows, keep, of_columns[i].tolist())
                for i, keep in enumerate(kept.tolist())
            ]
            return TextBlock(
                outcome, lines, num_lines, names.tobytes().decode().split("\n")[:-1], made
            )
        finally:
            self._free_cells(block)

    def _column(
        self, block: int, place: int, rows: int, keep: int, facts: Sequence[int]
    ) -> Texts | np.ndarray | None:
        cells, texts, size, are_numbers = facts
        if keep == NUMBERS and are_numbers:
            numbers = np.empty(rows)
            self._copy_numbers(block, place, numbers.ctypes.data)
            return numbers
        if keep in (NOTHING, NUMBERS):
            return None
        codes, offsets = np.empty(cells, np.int32), np.zeros(texts + 1, np.int32)
        data, tags = np.empty(size, np.uint8), np.zeros(texts, np.uint8)
        arrays = (codes, offsets[1:], data, tags)
        self._copy_column(block, place, *(array.ctypes.data for array in arrays))
        return Texts(codes if keep == DISTINCT else None, offsets, data, tags)


def _view(hashes: np.ndarray, ids: np.ndarray, directory: np.ndarray) -> _Table:
    if ids.dtype not in (np.int8, np.int16, np.int32):
        raise ValueError(f"ids: expected int8, int16 or int32, got {ids.dtype}")
    prefixes = directory.size - 1  # of a hash, 2**k
    if prefixes < 1 or prefixes & (prefixes - 1) or directory[-1] != hashes.size:
        raise ValueError(
            f"sizes do not fit: expected a directory of 2**k + 1 places that ends with "
            f"{hashes.size}, got {list(directory.shape)}, which ends with {directory[-1:]}"
        )
    return _Table(
        _pointer(hashes, _UINT64, hashes.size),
        _pointer(ids, ids.dtype, hashes.size),
        _pointer(directory, _INT64, directory.size),
        directory.size,
        ids.itemsize,
    )


def _pointer(array: np.ndarray, dtype: np.dtype, size: int) -> int:
    """Returns a pointer to an array's data, after checking that the library accepts it."""
    if array.dtype != dtype or array.size != size or not array.flags.c_contiguous:
        raise ValueError(
            f"sizes do not fit: expected {size} of {dtype} in one piece, got "
            f"{list(array.shape)} of {array.dtype}"
        )
    return array.ctypes.data


def _load() -> tuple[Host | None, str]:
    if not LIBRARY.is_file():
        return None, f"{LIBRARY}: was not built"
    try:
        return Host(LIBRARY), ""
    except OSError as error:  # for another machine, or a later C library
        logging.getLogger(__name__).warning(
            "numpy parses rows instead of the native parser of dlrm, several times slower: %s",
            error,
        )
        return None, str(error)


host, why_not = _load()  # None and the reason if numpy is used instead
