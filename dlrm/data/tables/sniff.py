"""Drafts the format of text files from their beginnings: encoding, delimiter, quotes, and marks."""

import codecs
import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dlrm.data.sources import native
from dlrm.data.sources.csv_rows import DELIMITERS, array_of_cells, delimiter_of, has_header
from dlrm.data.sources.native import Marks
from dlrm.data.sources.text_files import BROKEN, open_bytes
from dlrm.data.sources.text_format import MARKS, NONE, TextFormat
from dlrm.data.tables.kinds.kind import TableFile
from dlrm.data.tables.kinds.text import Text
from dlrm.data.tables.summaries import MARKERS

_MOST_FILES, _BEGINNING = 3, 1 << 20  # files, and bytes of each, that are read
_MOST_LINES, _MOST_ROWS = 100, 5000
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_C1 = re.compile(rb"[\x80-\x9f]")  # control characters in Latin-1, and letters in Windows-1252
_NOT_CP1252 = re.compile(rb"[\x81\x8d\x8f\x90\x9d]")
_SPARSE = re.compile(r"\s*[+-]?[\d.]+(\s+\d+(:\d+)?:[+-]?[\d.]+([eE][+-]?\d+)?)+\s*", re.ASCII)
_POINT = re.compile(r"[+-]?\d*\.\d+", re.ASCII)


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
    samples = [_beginning(file, given) for file in files]
    samples = [sample for sample in samples if sample.strip()][:_MOST_FILES]
    if not samples:
        return Sniffed(given, None)
    text_format = TextFormat()
    if given.encoding is None:
        text_format = replace(text_format, encoding=_encoding(samples))
    if files[0].kind.delimited:
        encoding = given.encoding or text_format.encoding or "utf-8-sig"
        decode = codecs.getincrementaldecoder(encoding)
        decoded = [decode("replace").decode(sample).removeprefix("\ufeff") for sample in samples]
        lines = [line for line in decoded[0].splitlines()[:_MOST_LINES] if line.strip()]
        text = _Text(decoded, lines)
        text_format = _of_csv(files[0], text, given, text_format)
    return Sniffed(given.over(text_format), _line(given, text_format))


def _line(given: TextFormat, detected: TextFormat) -> str | None:
    flags = vars(given)
    new = {n: v for n, v in vars(detected).items() if v is not None and flags[n] is None}
    if not new:
        return None
    line = f"{', '.join(f'{name} {value!r}' for name, value in new.items())} (from the files)"
    if new.get("encoding") in ("latin-1", "cp1252"):
        line += "; the encoding is in doubt: only that it is not UTF-8 is sure"
    return line


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
    if any(sample.startswith(_UTF_16) for sample in samples):
        return "utf-16"
    data = b"\n".join(samples)
    try:
        data.decode()
    except UnicodeDecodeError:
        windows = _C1.search(data) and not _NOT_CP1252.search(data)
        return "cp1252" if windows else "latin-1"
    return None


@dataclass(frozen=True)
class _Text:
    """The beginnings of files as text, and their first lines."""

    parts: list[str]
    lines: list[str]

    def __contains__(self, text: str) -> bool:
        return any(text in part for part in self.parts)

    def records(self, delimiter: str, quote: str | None, escape: str | None) -> list[list[str]]:
        """Returns the records of the first part; none if they differ in length or are not CSV."""
        block = self.parts[0].encode().lstrip(b"\r\n")
        marks = Marks(delimiter, quote, escape)
        head = native.read_csv_head(block, marks, False)
        keep = [native.TEXTS] * len(head.cells)
        read = native.read_csv(block, marks, False, False, False, keep)
        if read.outcome != native.ROWS:
            within = self.parts[0].count("\n") - len(read.lines) > _MOST_LINES
            if within or len(self.parts[0]) < _BEGINNING // 4:  # not a row that the end cuts
                return []
        if any(row < _MOST_ROWS for row, *_ in read.bad):
            return []
        texts = [array_of_cells(column) for column in read.columns if column is not None]
        columns = [array[:_MOST_ROWS].to_pylist() for array in texts]
        return list(map(list, zip(*columns, strict=True)))


def _of_csv(file: TableFile, text: _Text, given: TextFormat, detected: TextFormat) -> TextFormat:
    written = delimiter_of(file.path, given)
    delimiter = given.delimiter or _delimiter(text.lines, written)
    if delimiter is not None and given.delimiter is None:
        detected = replace(detected, delimiter=delimiter)
    delimiter = delimiter or written
    if text.lines and all(map(_SPARSE.fullmatch, text.lines)):
        raise ValueError(
            f"{file.path}: expected a table, got rows of labels and INDEX:VALUE, as of libsvm; "
            "write each field as a column, or the indices and values as two columns of lists"
        )
    quote, escape = given.quote or '"', given.escape
    if given.quote is None and escape is None:
        quote, escape = _quoting(text, delimiter)
        detected = replace(detected, quote=None if quote == '"' else quote, escape=escape)
    records = text.records(delimiter, None if quote == NONE else quote, escape)
    cells = records[1:] if has_header(given) else records
    columns = [[cell.strip() for cell in column] for column in zip(*cells, strict=True)]
    if given.decimal is None and given.thousands is None:
        decimal, thousands = _marks(columns)
        detected = replace(detected, decimal=decimal, thousands=thousands)
    return detected


def _delimiter(lines: Sequence[str], default: str) -> str | None:
    """Returns the delimiter of lines that the default one does not divide; None keeps it."""
    if not lines or len(_cells(lines[0], default)) > 1:
        return None
    best, most = None, 1
    for other in DELIMITERS:
        widths = [len(_cells(line, other)) for line in lines]
        same = widths.count(widths[0]) >= 0.9 * len(widths)
        if other != default and same and widths[0] > most:
            best, most = other, widths[0]
    return best


def _cells(line: str, delimiter: str) -> list[str]:
    """Returns the cells of a line, also of one with quotes as text."""
    try:
        return next(csv.reader([line], delimiter=delimiter, skipinitialspace=True, strict=True), [])
    except csv.Error:
        return line.split(delimiter)


def _quoting(text: _Text, delimiter: str) -> tuple[str, str | None]:
    """Returns the quote, or `NONE`, and the escape character of a text."""
    plain = text.records(delimiter, None, None) if '"' in text else []
    if delimiter == "\t" and ('"' not in text or (plain and not _enclosed(plain))):
        return NONE, None
    quoted = text.records(delimiter, '"', None)
    escaped = '\\"' in text and text.records(delimiter, '"', "\\")
    if escaped and (not quoted or any('\\"' in cell for record in quoted for cell in record)):
        return '"', "\\"
    if not quoted and plain:
        return NONE, None
    return '"', None


def _enclosed(records: Sequence[Sequence[str]]) -> bool:
    """Returns whether quotes are around whole columns or names, of records split without quotes."""

    def quoted(cells: Sequence[str]) -> bool:
        return all(len(c) > 1 and c[0] == c[-1] == '"' for c in cells)

    return quoted(records[0]) or any(map(quoted, zip(*records[1:], strict=True)))


def _marks(columns: Sequence[Sequence[str]]) -> tuple[str | None, str | None]:
    """Returns the decimal mark and that of thousands, as far as no cell leaves them in doubt."""
    present = [
        [cell for cell in column if cell.lower() not in ("", *MARKERS)] for column in columns
    ]
    present = [column for column in present if column]
    for decimal in (".", ","):
        for thousands in (*MARKS, None):
            if thousands != decimal and _written(present, decimal, thousands):
                return (None if decimal == "." else decimal), thousands
    return None, None


def _written(columns: Sequence[Sequence[str]], decimal: str, thousands: str | None) -> bool:
    """Returns whether numbers have these marks, and none can have others."""
    group, point = re.escape(thousands or ""), re.escape(decimal)
    whole = rf"(?:\d{{1,3}}(?:{group}\d{{3}})+|\d+)" if thousands else r"\d+"
    number = re.compile(rf"[+-]?(?:{whole})?(?:{point}\d+)?", re.ASCII)
    sure = rf"[+-]?\d{{1,3}}(?:{group}\d{{3}})+{point}\d+|[+-]?\d{{1,3}}(?:{group}\d{{3}}){{2,}}"
    if thousands is None:
        sure = rf"[+-]?\d*{point}(?:\d{{1,2}}|\d{{4,}})|[+-]?\d{{4,}}{point}\d+"
        if decimal == ".":
            return False
    certain = re.compile(sure, re.ASCII)
    any_certain = False
    for column in columns:
        if all(map(number.fullmatch, column)):
            any_certain = any_certain or any(map(certain.fullmatch, column))
        elif decimal == "," and _has_points(column):
            return False  # numbers of another form as well
    return any_certain


def _has_points(column: Sequence[str]) -> bool:
    plain = re.compile(r"[+-]?\d*\.?\d+", re.ASCII)
    return all(map(plain.fullmatch, column)) and any(map(_POINT.fullmatch, column))
