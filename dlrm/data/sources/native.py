"""The compiled host code, `dlrm/_host.so` of `csrc/host`: the log parser and the lookup of ids.

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
_VERSION = 2  # of the interface, as in csrc/host/host.cpp
_Place, _Pointer = ctypes.c_int64, ctypes.c_void_p
_BOOL, _UINT8, _INT64, _UINT64 = map(np.dtype, (np.bool_, np.uint8, np.int64, np.uint64))


class _ParsedLines(ctypes.Structure):
    _fields_ = [
        *((name, _Place) for name in ("num_numerical", "num_categorical", "labelled", "capacity")),
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

    def parse_lines(
        self, text: bytes, num_numerical: int, num_categorical: int, labelled: bool
    ) -> ParsedText:
        """Parses lines up to the first that cannot be read; see `log_lines.parse_lines`."""
        rows = self._count_lines(text, len(text))
        labels = np.empty(rows, bool)
        integers = np.empty((num_numerical, rows), np.int64)
        hashes = np.empty((num_categorical, rows), np.uint64)
        missing = np.empty((num_numerical + num_categorical, rows), bool)
        arrays = (array.ctypes.data for array in (labels, integers, hashes, missing))
        lines = _ParsedLines(num_numerical, num_categorical, labelled, rows, *arrays, 0)
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
        rows = starts.size
        if rows and not (starts.min() >= 0 and (starts <= ends).all() and ends.max() <= data.size):
            raise ValueError(f"sizes do not fit: expected texts within {data.size} bytes")
        hashes = np.empty(rows, np.uint64)
        self._hash_texts(
            _pointer(data, _UINT8, data.size),
            rows,
            _pointer(starts, _INT64, rows),
            _pointer(ends, _INT64, rows),
            hashes.ctypes.data,
        )
        return hashes


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
            "dlrm: numpy parses rows instead of the native parser, several times slower: %s", error
        )
        return None, str(error)


host, why_not = _load()  # None and the reason if numpy is used instead
