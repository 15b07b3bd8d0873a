"""Copies of text, and of small files together, that tasks read: each is one group of Arrow rows."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from dlrm.data.sources import native
from dlrm.data.sources.column_names import check_columns
from dlrm.data.sources.csv_rows import Spans, Undecided
from dlrm.data.sources.text_files import (
    ByteRange,
    compression_of,
    count_lines,
    other_encoding,
)
from dlrm.data.sources.text_format import NONE, TextFormat
from dlrm.data.tables.kinds.cells import Cells
from dlrm.data.tables.kinds.columnar import Columnar
from dlrm.data.tables.kinds.kind import TableFile
from dlrm.data.tables.kinds.text import LINE, PROBLEM, Reading, Text
from dlrm.files import staged_file, sync

_MOST_SMALL = 1 << 18  # bytes of a columnar file that is copied with others
_MANY_FILES = 64  # columnar files from which small ones are copied
_PACKED = 8  # times the size of a compressed file that its text may have


class Piece(NamedTuple):
    """What one task copies.

    Attributes:
        files: whole files of one kind, by their number among all files.
        within: the lines to copy of the only file; None is all.
        names: columns of the CSV whose lines these are, of which only the first can be a header.
    """

    files: list[tuple[int, TableFile]]
    within: ByteRange | None = None
    names: tuple[str, ...] = ()


class Copied(NamedTuple):
    """A copy: its path, rows and size, and for each file its number, rows and lines."""

    path: str
    rows: int
    size: int
    origins: list[tuple[int, int, int]]


class Copying(NamedTuple):
    """How to copy; see `Text.stage`."""

    text: TextFormat
    columns: Sequence[str]
    quarantine: bool
    cells: Cells


def pieces_of(
    files: Sequence[TableFile], text: TextFormat, piece_bytes: int, groups: Sequence[Any]
) -> tuple[list[Piece], list[int]]:
    """Returns pieces of files, and the numbers of the files that are in none.

    The pieces of a file follow each other. The others are large files that have to be read from
    their beginning, and columnar ones with groups of their own.

    Args:
        files: files of one kind.
        text: their format, if they are text.
        piece_bytes: approximate maximum size of a piece.
        groups: a value for each file; a piece has files of one.
    """
    pieces: list[Piece] = []
    alone: list[int] = []
    size = 0
    for number, file in enumerate(files):
        of_file = _size(file, text, len(files))
        if of_file is None or (of_file > piece_bytes and not _has_ranges(file, text)):
            alone.append(number)
        elif of_file > piece_bytes:
            pieces += _ranges(number, file, text, piece_bytes)
        else:
            size += of_file
            last = pieces[-1].files[-1][0] if pieces and pieces[-1].within is None else None
            follows = last is not None and last == number - 1 and groups[last] == groups[number]
            if not follows or size > piece_bytes:
                pieces.append(Piece([]))
                size = of_file
            pieces[-1].files.append((number, file))
    return pieces, alone


def _size(file: TableFile, text: TextFormat, num_files: int) -> int | None:
    """Returns the approximate bytes of a file; None if it is read as it is."""
    if isinstance(file.kind, Text):
        if not file.kind.in_pieces:
            return None
        return file.path.stat().st_size * (1 if _is_plain(file, text) else _PACKED)
    small = num_files >= _MANY_FILES and file.path.stat().st_size <= _MOST_SMALL
    return file.path.stat().st_size if small else None


def _is_plain(file: TableFile, text: TextFormat) -> bool:
    return text.compression == "none" or compression_of(file.path) == "none"


def _has_ranges(file: TableFile, text: TextFormat) -> bool:
    """Returns whether the lines of a file can be read on their own."""
    assert isinstance(file.kind, Text)
    if file.kind.delimited and (native.host is None or text.escape not in (None, NONE)):
        return False
    return other_encoding(text.encoding) is None and _is_plain(file, text)


def _ranges(number: int, file: TableFile, text: TextFormat, piece_bytes: int) -> Iterator[Piece]:
    size = file.path.stat().st_size
    names = tuple(file.kind.names(file.path, text)) if file.kind.delimited else ()
    count = -(-size // piece_bytes)
    ends = [size * (i + 1) // count for i in range(count)]
    for begin, end in zip([0, *ends], ends, strict=False):
        yield Piece([(number, file)], ByteRange(begin, end), names)


def copy(piece: Piece, target: str, how: Copying) -> dict[str, Any]:
    """Copies a piece into Arrow files, which appear when they are whole.

    Cells of text stay text. A column `LINE` has their lines, within the range of a piece, and a
    column `PROBLEM` the problem of a row as a whole.

    Args:
        piece: the piece.
        target: begin of the paths; files whose columns have other types get a file of their own.
        how: what to copy.

    Returns:
        The `copies`, which are `Copied`; the `names` of the files' columns, those of `numbers` in
        JSON, the number of `rows`, and the `notes` about rows of several lines. Nothing at all if
        rows of a range of lines may have several of them.

    Raises:
        ValueError: a file is damaged, or a column is missing; the message has file and place.
    """
    try:
        return _copy(piece, target, how)
    except Undecided:
        return {}
    except ValueError:
        if piece.within is None or not piece.within.begin:
            raise
        path = piece.files[0][1].path
        lines = count_lines(path, ByteRange(0, piece.within.begin))
        return _copy(piece._replace(within=piece.within._replace(lines=lines)), target, how)


def _copy(piece: Piece, target: str, how: Copying) -> dict[str, Any]:
    known, numbers, notes = dict[str, None](), set(how.columns), list[str]()
    batches: list[pa.RecordBatch] = []
    origins: list[tuple[int, int, int]] = []
    copies: list[Copied] = []

    def finish() -> None:
        if batches:
            path = f"{target}.{len(copies)}.arrow"
            copies.append(Copied(path, *_write(batches, path), origins.copy()))
        batches.clear()
        origins.clear()

    for number, file in piece.files:
        if isinstance(file.kind, Text):
            of_file = _text_batches(file, file.kind, piece, how, known, numbers, notes)
        else:
            of_file = _columnar_batches(file, how, known)
            numbers.clear()
        rows = 0
        for batch in of_file:
            if batches and batch.schema != batches[0].schema:
                if rows:
                    origins.append((number, rows, 0))
                finish()
                rows = 0
            batches.append(batch)
            rows += batch.num_rows
        if rows:
            lines = 0 if piece.within is None else count_lines(file.path, piece.within)
            origins.append((number, rows, lines))
    finish()
    sync(Path(target).parent)
    rows = sum(copied.rows for copied in copies)
    found = {"names": [*known], "numbers": sorted(numbers), "notes": notes}
    return {"copies": copies, "rows": rows, **found}


def _write(batches: list[pa.RecordBatch], path: str) -> tuple[int, int]:
    """Writes batches as one; returns rows and bytes."""
    table = pa.Table.from_batches(batches).unify_dictionaries().combine_chunks()
    (batch,) = table.to_batches()
    with staged_file(path, one_of_many=True) as partial:
        with pa.OSFile(str(partial), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
            writer.write_batch(batch)
        return batch.num_rows, partial.stat().st_size


def _columnar_batches(
    file: TableFile, how: Copying, known: dict[str, None]
) -> Iterator[pa.RecordBatch]:
    assert isinstance(file.kind, Columnar)
    seen = set[str]()
    batches = file.kind.batches(file, how.text, how.columns, seen=seen)
    for batch, _ in batches:
        check_columns(file.path, [*seen], how.columns)
        if batch.num_rows:
            yield batch.select(how.columns).replace_schema_metadata(None)
    known |= dict.fromkeys(sorted(seen))


def _text_batches(
    file: TableFile,
    kind: Text,
    piece: Piece,
    how: Copying,
    known: dict[str, None],
    numbers: set[str],
    notes: list[str],
) -> Iterator[pa.RecordBatch]:
    partition, cells, text = file.partition, how.cells, how.text
    in_file = [name for name in how.columns if name not in partition]
    distinct = {name for name in in_file if name not in cells.plain}
    spans, problems = Spans(), {} if how.quarantine else None
    reading = Reading(text, cells.separators, in_file, problems, spans, None, distinct)
    if piece.within is not None:
        reading = reading._replace(within=piece.within)
        if piece.names and piece.within.begin:
            without = replace(text, columns=piece.names, header=False)
            reading = reading._replace(text=without)
    for names, lines, read in kind.read(file.path, reading):
        known |= dict.fromkeys([*names, *partition])
        kind.check_names(file.path, names, text, in_file)
        rows = len(lines)
        if not rows:
            continue
        arrays = {name: kind.array(name, column, cells, text, numbers) for name, column in read}
        arrays |= {name: pa.array([value] * rows) for name, value in partition.items()}
        made = [_typed(name, arrays.get(name, pa.nulls(rows)), cells) for name in how.columns]
        wrong = [problems.get(line) for line in lines.tolist()] if problems else pa.nulls(rows)
        made += [pa.array(lines, kind.line_type), pa.array(wrong, pa.string())]
        yield pa.RecordBatch.from_arrays(made, [*how.columns, LINE, PROBLEM])
    notes += filter(None, [spans.note(file.path, text)])


def _typed(name: str, array: pa.Array, cells: Cells) -> pa.Array:
    """Returns a column in the type that it has in every batch."""
    kind = cells.type_of(name)
    if pa.types.is_string(kind) and name not in cells.plain:
        kind = pa.dictionary(pa.int32(), kind)
    if array.type == kind:
        return array
    if pa.types.is_dictionary(kind):
        return array.cast(kind.value_type).dictionary_encode()
    return array.cast(kind)
