"""Drafts the format of text files from their beginnings: encoding, delimiter, quotes, and marks."""

import csv
import io
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice, product
from typing import Any, NamedTuple

import numpy as np

from dlrm.data.sources.csv_cells import number_parser
from dlrm.data.sources.csv_rows import DELIMITERS, delimiter_of, has_header
from dlrm.data.sources.row_error import shown_text
from dlrm.data.sources.text_files import BROKEN, open_bytes
from dlrm.data.sources.text_format import MARKS, NONE, TextFormat, plain_number
from dlrm.data.tables.kinds.kind import TableFile
from dlrm.data.tables.kinds.text import Text
from dlrm.data.tables.summary import MARKERS

_MOST_FILES, _BEGINNING = 3, 1 << 20  # files, and bytes of each, that are read
_MOST_LINES, _MOST_ROWS, _MOST_MARKED = 100, 5000, 500
_C1 = re.compile(rb"[\x80-\x9f]")  # control characters in Latin-1, and letters in Windows-1252
_NOT_CP1252 = re.compile(rb"[\x81\x8d\x8f\x90\x9d]")
_SPARSE = re.compile(r"\s*[+-]?[\d.]+(\s+\d+(:\d+)?:[+-]?[\d.]+([eE][+-]?\d+)?)+\s*", re.ASCII)


Rows = list[list[str]]


class Sniffed(NamedTuple):
    """The format of text files, and a line about what was seen of it; None if nothing was."""

    text: TextFormat
    line: str | None


def sniff(files: Sequence[TableFile], given: TextFormat) -> Sniffed:
    """Returns the format of files of text: the given part, and the rest as their beginnings show.

    Raises:
        ValueError: the files are of a form that is no table, such as that of libsvm.
    """
    if not files or not isinstance(files[0].kind, Text):
        return Sniffed(given, None)
    samples = [_beginning(file, given) for file in files[:_MOST_FILES]]
    found = TextFormat(encoding=given.encoding or _encoding(samples))
    sample = next(filter(bytes.strip, samples), b"")
    if files[0].kind.delimited and sample:
        text = sample.decode(found.encoding or "utf-8-sig", "replace")
        found = _of_csv(files[0], text, given.over(found))
    new = {n: v for n, v in vars(found).items() if v is not None and vars(given)[n] is None}
    line = ", ".join(f"{name} {value!r}" for name, value in new.items()) + " (from the files)"
    if new.get("encoding") in ("latin-1", "cp1252"):
        line += "; the encoding is in doubt: only that it is not UTF-8 is sure"
    return Sniffed(given.over(found), line if new else None)


def _beginning(file: TableFile, given: TextFormat) -> bytes:
    """Returns the first bytes of a file, up to the end of a line; b"" if it cannot be read."""
    try:
        with open_bytes(file.path, given.compression) as opened:
            data = opened.read(_BEGINNING)
    except (*BROKEN, ValueError):
        return b""  # which the reader will refuse, with its name
    return data if len(data) < _BEGINNING else data[: data.rfind(b"\n") + 1]


def _encoding(samples: Sequence[bytes]) -> str | None:
    """Returns the encoding of texts; None for UTF-8."""
    if any(sample.startswith((b"\xff\xfe", b"\xfe\xff")) for sample in samples):
        return "utf-16"
    data = b"\n".join(samples)
    try:
        data.decode()
    except UnicodeDecodeError:
        return "cp1252" if _C1.search(data) and not _NOT_CP1252.search(data) else "latin-1"
    return None


def _of_csv(file: TableFile, text: str, given: TextFormat) -> TextFormat:
    """Returns the format that divides the rows of a text, as far as one does."""
    if all(_SPARSE.fullmatch(line) for line in text.split("\n")[:_MOST_LINES] if line.strip()):
        raise ValueError(
            f"{file.path}: expected a table, got rows of labels and INDEX:VALUE, as of libsvm; "
            "write each field as a column, or the indices and values as two columns of lists"
        )
    default = delimiter_of(file.path, given)
    if (found := _fitting(text, given, default)) is None:
        first, _, rest = text.partition("\n")
        if has_header(given) and _fitting(rest, given, default) is not None:
            raise ValueError(
                f"{file.path}, line 1: expected the names of columns, got {shown_text(first)}; "
                "remove the line, or write a line of names as wide as the rows below"
            )
        return given
    fitting, rows = found
    if fitting.decimal is None and fitting.thousands is None:
        columns = zip(*rows[has_header(given) :][:_MOST_MARKED], strict=True)
        marks = _marks([[cell.strip().lower() for cell in column] for column in columns])
        fitting = replace(fitting, decimal=marks[0], thousands=marks[1])
    return fitting


def _fitting(text: str, given: TextFormat, default: str) -> tuple[TextFormat, Rows] | None:
    """Returns the first format that divides all rows alike, or nine of ten, and these rows."""
    nearly = None
    for delimiter in [default] if given.delimiter else [default, *DELIMITERS, "\x01"]:
        quotings, tabs = [(given.quote, given.escape)], False
        if given.quote is None and given.escape is None:
            quotings, tabs = [(None, None), (None, "\\"), (NONE, None)], delimiter == "\t"
        for quote, escape in [(NONE, None)] * tabs + quotings:  # of which quotes are mostly text
            rows, whole = _records(text, delimiter, quote, escape)
            alike = [row for row in rows if len(row) == len(rows[0])]
            if not rows or len(rows[0]) < 2 or (tabs and quote == NONE and _enclosed(alike)):
                continue
            named = given.delimiter if delimiter == default else delimiter
            found = replace(given, delimiter=named, quote=quote, escape=escape), alike
            if whole and len(alike) == len(rows):
                return found
            if quote != NONE and escape is None and len(alike) >= 0.9 * len(rows):
                nearly = nearly or found
    return nearly


def _records(text: str, delimiter: str, quote: str | None, escape: str | None) -> tuple[Rows, bool]:
    """Returns the first rows of a text, and whether nothing but its end is no row."""
    lines, rows = io.StringIO(text, newline=""), list[list[str]]()
    options: dict[str, Any] = {"delimiter": delimiter, "skipinitialspace": True, "strict": True}
    options["quoting"] = csv.QUOTE_NONE if quote == NONE else csv.QUOTE_MINIMAL
    options["quotechar"] = '"' if quote in (None, NONE) else quote
    if escape not in (None, NONE):
        options |= {"escapechar": escape, "doublequote": False}
    try:
        rows.extend(row for row in islice(csv.reader(lines, **options), _MOST_ROWS) if row)
    except csv.Error:
        return rows, len(text) > _BEGINNING // 4 and text.count("\n") - len(rows) < _MOST_LINES
    return rows, True


def _enclosed(rows: Sequence[Sequence[str]]) -> bool:
    """Returns whether quotes are around whole columns or names, of rows split without quotes."""
    return any(
        all(len(cell) > 1 and cell[0] == cell[-1] == '"' for cell in cells)
        for cells in (rows[0], *zip(*rows[1:], strict=True))
    )


def _marks(columns: Sequence[Sequence[str]]) -> tuple[str | None, str | None]:
    """Returns the marks by which most columns are numbers, unless others give other numbers."""
    parse = number_parser(("", *MARKERS))
    columns = [[cell for cell in cells if not cell.isdecimal()] for cells in columns]
    readings: list[tuple[dict[int, list[float]], str | None, str | None]] = []
    for decimal, thousands in product((".", ","), (None, *MARKS)):
        read = {}
        for place, cells in enumerate(columns):
            with suppress(ValueError):
                numbers = parse([plain_number(cell, decimal, thousands) for cell in cells])
                read[place] = np.nan_to_num(numbers).tolist()
        if decimal != thousands:
            readings.append((read, None if decimal == "." else decimal, thousands))
    most = max(len(read) for read, *_ in readings)
    likely = [reading for reading in readings if len(reading[0]) == most]
    same = all(read == likely[0][0] for read, *_ in likely)
    return (likely[0][1], likely[0][2]) if same else (None, None)
