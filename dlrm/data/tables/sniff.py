"""Drafts the format of text files from their beginnings: encoding, delimiter, quotes, and marks."""

import csv
import io
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from typing import Any

from dlrm.data.sources.csv_rows import DELIMITERS, delimiter_of, has_header
from dlrm.data.sources.row_error import shown_text
from dlrm.data.sources.text_files import BROKEN, open_bytes
from dlrm.data.sources.text_format import MARKS, NONE, TextFormat, plain_number
from dlrm.data.tables.formats.base import TableFile
from dlrm.data.tables.formats.text import Text
from dlrm.data.tables.summary import MARKERS

_MOST_FILES, _BEGINNING = 3, 1 << 20  # files, and bytes of each, that are read
_MOST_LINES, _MOST_ROWS, _MOST_MARKED = 100, 5000, 500
_C1 = re.compile(rb"[\x80-\x9f]")  # control characters in Latin-1, and letters in Windows-1252
_NOT_CP1252 = re.compile(rb"[\x81\x8d\x8f\x90\x9d]")
_SPARSE = re.compile(r"\s*[+-]?[\d.]+(\s+\d+(:\d+)?:[+-]?[\d.]+([eE][+-]?\d+)?)+\s*", re.ASCII)


def sniff(files: Sequence[TableFile], given: TextFormat) -> tuple[TextFormat, str | None]:
    """Returns the format of files, and a line about what was seen of it; None if nothing was.

    Args:
        files: files of one format; only those of text have a format.
        given: the part that is known.

    Raises:
        ValueError: the files are of a form that is no table, such as that of libsvm.
    """
    if not files or not isinstance(files[0].format, Text):
        return given, None
    samples = [_beginning(file.path, given) for file in files[:_MOST_FILES]]
    found = given.over(TextFormat(encoding=_encoding(samples)))
    sample = next(filter(bytes.strip, samples), b"")
    if files[0].format.delimited and sample:
        text = sample.decode(found.encoding or "utf-8-sig", "replace")
        found = _of_csv(files[0].path, text, found)
    new = {n: v for n, v in vars(found).items() if v is not None and vars(given)[n] is None}
    line = ", ".join(f"{name} {value!r}" for name, value in new.items()) + " (from the files)"
    if new.get("encoding") in ("latin-1", "cp1252"):
        line += "; the encoding is in doubt: only that it is not UTF-8 is sure"
    return found, line if new else None


def _beginning(path: Path, given: TextFormat) -> bytes:
    """Returns the first bytes of a file, up to the end of a line; b"" if it cannot be read."""
    try:
        with open_bytes(path, given.compression) as opened:
            data = opened.read(_BEGINNING)
    except (*BROKEN, ValueError):
        return b""  # which the reader will refuse, with its name
    return data if len(data) < _BEGINNING else data[: data.rfind(b"\n") + 1]


def _encoding(samples: Sequence[bytes]) -> str | None:
    """Returns the encoding of texts; None for UTF-8."""
    if any(sample.startswith((b"\xff\xfe", b"\xfe\xff")) for sample in samples):
        return "utf-16"
    data = b"\n".join(samples)
    with suppress(UnicodeDecodeError):
        data.decode()
        return None
    return "cp1252" if _C1.search(data) and not _NOT_CP1252.search(data) else "latin-1"


def _of_csv(path: Path, text: str, given: TextFormat) -> TextFormat:
    """Returns the format that divides the rows of a text, as far as one does."""
    if all(_SPARSE.fullmatch(line) for line in text.split("\n")[:_MOST_LINES] if line.strip()):
        raise ValueError(
            f"{path}: expected a table, got rows of labels and INDEX:VALUE, as of libsvm; write "
            "each field as a column, or the indices and values as two columns of lists"
        )
    default = delimiter_of(path, given)
    found, rows = _fitting(text, given, default)
    first, _, rest = text.partition("\n")
    if not rows and has_header(given) and _fitting(rest, given, default)[1]:
        raise ValueError(
            f"{path}, line 1: expected the names of columns, got {shown_text(first)}; remove the "
            "line, or write a line of names as wide as the rows below"
        )
    if rows and found.decimal is None and found.thousands is None:
        decimal, thousands = _marks(rows[has_header(given) :][:_MOST_MARKED])
        found = replace(found, decimal=decimal, thousands=thousands)
    return found


def _fitting(text: str, given: TextFormat, default: str) -> tuple[TextFormat, list[list[str]]]:
    """Returns the first format that divides all rows alike, or nine of ten, and these rows.

    If none does, it is the given format without rows.
    """
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
    return nearly or (given, [])


def _records(
    text: str, delimiter: str, quote: str | None, escape: str | None
) -> tuple[list[list[str]], bool]:
    """Returns the first rows of a text, and whether nothing but its end is no row."""
    options: dict[str, Any] = {"delimiter": delimiter, "skipinitialspace": True, "strict": True}
    options["quoting"] = csv.QUOTE_NONE if quote == NONE else csv.QUOTE_MINIMAL
    options["quotechar"] = '"' if quote in (None, NONE) else quote
    if escape not in (None, NONE):
        options |= {"escapechar": escape, "doublequote": False}
    lines, rows = io.StringIO(text, newline=""), list[list[str]]()
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


def _marks(rows: Sequence[Sequence[str]]) -> tuple[str | None, str | None]:
    """Returns the marks by which most columns are numbers, unless others give other numbers."""
    readings: dict[tuple[str | None, str | None], dict[int, list[float]]] = {}
    columns = [[cell.strip() for cell in column] for column in zip(*rows, strict=True)]
    for decimal, thousands in product((None, ","), (None, *MARKS)):
        read = readings.setdefault((decimal, thousands), {})
        for index, cells in enumerate(columns):
            cells = [cell for cell in cells if cell and cell.lower() not in MARKERS]
            plain = [plain_number(cell, decimal or ".", thousands) for cell in cells]
            if (decimal or ".") != thousands and not all(map(str.isdecimal, cells)):
                with suppress(ValueError):  # Python reads 1_000, and no one else
                    read[index] = [float(number.replace("_", " ")) for number in plain]
    most = max(map(len, readings.values()))
    likely = [marks for marks, read in readings.items() if len(read) == most]
    same = all(readings[marks] == readings[likely[0]] for marks in likely)
    return likely[0] if same else (None, None)
