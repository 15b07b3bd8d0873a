"""Copies of text, and of small files together, that tasks read: each is one group of Arrow rows."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from dlrm.data.sources import native
from dlrm.data.sources.column_names import check_columns
from dlrm.data.sources.csv_rows import Reading, Spans, UndecidedError
from dlrm.data.sources.row_error import LEAVES_OUT, LineError
from dlrm.data.sources.text_files import ByteRange, compression_of, count_lines, other_encoding
from dlrm.data.sources.text_format import NONE, TextFormat
from dlrm.data.tables.columns import floats_of
from dlrm.data.tables.kinds.cells import Cells
from dlrm.data.tables.kinds.columnar import Columnar
from dlrm.data.tables.kinds.kind import TableFile
from dlrm.data.tables.kinds.text import LINE, PROBLEM, Rows, Text
from dlrm.files import staged_file, sync
from dlrm.remote import task_files

_MOST_SMALL = 1 << 18  # bytes of a columnar file that is copied with others
_MANY_FILES = 64  # columnar files from which small ones are copied
_PACKED = 8  # times the size of a compressed file that its text may have


class Piece(NamedTuple):
    """The input of one task.

    Attributes:
        files: whole files of one kind, by their number among all files.
        within: the lines to copy of the only file; None is all.
        names: columns of the CSV whose lines these are, of which only the first can be a header.
    """

    files: list[tuple[int, TableFile]]
    within: ByteRange | None = None
    names: tuple[str, ...] = ()


class Copied(NamedTuple):
    """A copy: its rows, its size, and for each file its number, rows and lines."""

    rows: int
    size: int
    origins: list[tuple[int, int, int]]


class Copying(NamedTuple):
    """The arguments of all tasks that copy.

    Attributes:
        text: the format of text.
        columns: the columns to copy.
        quarantine: whether to accept rows of text that cannot be read.
        cells: the columns of lists and of numbers in text.
        floats: columns of text that become float64 in copies without other texts than numbers.
        copy_bytes: approximate maximum size of a copy of a whole file.
    """

    text: TextFormat
    columns: Sequence[str]
    quarantine: bool
    cells: Cells
    floats: Sequence[str]
    copy_bytes: int


def pieces_of(
    files: Sequence[TableFile], text: TextFormat, piece_bytes: int, groups: Sequence[Any]
) -> tuple[list[Piece], list[int]]:
    """Returns pieces of files of one kind, and the numbers of the files that are in none.

    The pieces of a file follow each other, and whole files in one have the same of `groups`. The
    others are large files that have to be read from their beginning, and columnar ones with groups
    of their own.
    """
    pieces: list[Piece] = []
    alone: list[int] = []
    size = 0
    for number, file in enumerate(files):
        of_file = _size(file, text, len(files))
        if of_file is None:
            alone.append(number)
        elif of_file > piece_bytes:
            ranges = _ranges(number, file, text, piece_bytes)
            pieces += ranges
            alone += [] if ranges else [number]
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
        return file.path.stat().st_size * (1 if _is_plain(file, text) else _PACKED)
    small = num_files >= _MANY_FILES and file.path.stat().st_size <= _MOST_SMALL
    return file.path.stat().st_size if small else None


def _is_plain(file: TableFile, text: TextFormat) -> bool:
    return text.compression == "none" or compression_of(file.path) == "none"


def _ranges(number: int, file: TableFile, text: TextFormat, piece_bytes: int) -> list[Piece]:
    """Returns pieces of the lines of a file; none if they cannot be read on their own."""
    if not isinstance(file.kind, Text):
        return []
    if other_encoding(text.encoding) is not None or not _is_plain(file, text):
        return []
    names: tuple[str, ...] = ()
    if file.kind.delimited:
        if native.host is None or text.escape not in (None, NONE):
            return []
        names = tuple(file.kind.names(file.path, text))
        if len(names) < 2 or any("\n" in name or "\r" in name for name in names):
            return []  # blank lines of one column are errors, which others decide on
    size = file.path.stat().st_size
    count = -(-size // piece_bytes)
    ends = [size * (i + 1) // count for i in range(count)]
    ranges = itertools.starmap(ByteRange, itertools.pairwise([0, *ends]))
    return [Piece([(number, file)], within, names) for within in ranges]


def copy(piece: Piece, target: str, how: Copying) -> dict[str, Any]:
    """Copies a piece into Arrow files, at `path_of_copy`, which appear when they are whole.

    Cells of text stay text, except for those of `how.floats`. A column `LINE` has their lines,
    within the range of a piece, and a column `PROBLEM` the problem of a row as a whole.

    Rows whose columns have other types get a file of their own.

    Returns:
        The `copies`, which are `Copied`; the `names` of the files' columns, those of `numbers` in
        JSON, the number of `rows`, and the `notes` about rows of several lines. Nothing at all if
        rows of a range of lines may have several of them.

    Raises:
        ValueError: a file is damaged, or a column is missing; the message has file and place.
    """
    try:
        return _copy(piece, target, how)
    except UndecidedError:
        return {}
    except ValueError:
        if piece.within is None or not piece.within.begin:
            raise
        path = piece.files[0][1].path
        lines = count_lines(path, ByteRange(0, piece.within.begin))
        return _copy(piece._replace(within=piece.within._replace(lines=lines)), target, how)


def path_of_copy(target: str, number: int) -> str:
    """Returns the path of a copy of a piece."""
    return f"{target}.{number}.arrow"


def _copy(piece: Piece, target: str, how: Copying) -> dict[str, Any]:
    is_whole = piece.within is None and len(piece.files) == 1
    made = _Copies(target, how.copy_bytes if is_whole else None)
    for _, file in piece.files:
        task_files.fetch(file.path)
    if not isinstance(piece.files[0][1].kind, Text):
        for number, file in piece.files:
            _add_columnar(made, number, file, how)
    else:
        text = _TextPiece(piece, how, made)
        for partition, files in itertools.groupby(piece.files, lambda one: one[1].partition):
            text.add(list(files), partition)
    made.finish()
    sync(Path(target).parent)
    rows = sum(copied.rows for copied in made.copies)
    return {"copies": made.copies, "rows": rows, **made.facts}


class _Copies:
    """Batches of rows that become files, of about `most` bytes if that is given.

    Attributes:
        copies: the files.
        known: names of the columns that were found.
        facts: other facts about the rows.
    """

    def __init__(self, target: str, most: int | None) -> None:
        self.copies: list[Copied] = []
        self.known: dict[str, None] = {}
        self.facts: dict[str, Any] = {"names": [], "numbers": [], "notes": []}
        self._target, self._most, self._size = target, most, 0
        self._batches: list[pa.RecordBatch] = []
        self._origins: list[tuple[int, int, int]] = []

    def add(self, batch: pa.RecordBatch, origins: Iterable[tuple[int, int]]) -> None:
        """Adds rows, and the rows of each file, by its number."""
        if self._batches and batch.schema != self._batches[0].schema:
            self._write()
        if batch.num_rows:
            self._batches.append(batch)
            self._size += batch.nbytes
        for number, rows in origins:
            if self._origins and self._origins[-1][0] == number:
                rows += self._origins.pop()[1]
            if rows:
                self._origins.append((number, rows, 0))
        if self._most is not None and self._size >= self._most:
            self._write()

    def count_lines(self, lines: int) -> None:
        """Notes the lines of the range whose rows were added."""
        if self._origins:
            self._origins[-1] = (*self._origins[-1][:2], lines)

    def finish(self) -> None:
        """Writes what is left."""
        self._write()
        self.facts["names"] = [*self.known]

    def _write(self) -> None:
        if self._batches:
            path = path_of_copy(self._target, len(self.copies))
            self.copies.append(Copied(*_write(self._batches, path), self._origins))
        self._batches, self._origins, self._size = [], [], 0


def _write(batches: list[pa.RecordBatch], path: str) -> tuple[int, int]:
    """Writes batches as one; returns rows and bytes."""
    table = pa.Table.from_batches(batches).unify_dictionaries().combine_chunks()
    (batch,) = table.to_batches()
    with staged_file(path, one_of_many=True) as partial:
        with pa.OSFile(str(partial), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
            writer.write_batch(batch)
        return batch.num_rows, partial.stat().st_size


def _add_columnar(made: _Copies, number: int, file: TableFile, how: Copying) -> None:
    assert isinstance(file.kind, Columnar)
    seen = set[str]()
    for batch, _ in file.kind.batches(file, how.text, how.columns, seen=seen):
        check_columns(file.path, [*seen], how.columns)
        batch = batch.select(list(how.columns)).replace_schema_metadata(None)
        made.add(batch, [(number, batch.num_rows)])
    made.known |= dict.fromkeys(sorted(seen))


class _TextPiece:
    """Reads the text of a piece."""

    def __init__(self, piece: Piece, how: Copying, made: _Copies) -> None:
        self._piece, self._how, self._made = piece, how, made
        self._numbers, self._floats = set(how.columns), set(how.floats)

    def add(self, files: list[tuple[int, TableFile]], partition: dict[str, str | None]) -> None:
        """Adds files of the same partition."""
        how, kind = self._how, files[0][1].kind
        assert isinstance(kind, Text)
        self._numbers -= partition.keys()
        in_file = [name for name in how.columns if name not in partition]
        distinct = {name for name in in_file if name not in how.cells.plain}
        lists, floats = how.cells.separators, self._floats
        reading = Reading(how.text, lists, in_file, distinct=distinct, numbers=floats)
        paths = [file.path for _, file in files]
        together = kind.read_together(paths, reading) if len(files) > 1 else None
        if together is not None:
            read, rows = together
            kind.check_names(paths[0], read[0], how.text, in_file)
            origins = [(number, count) for (number, _), count in zip(files, rows, strict=True)]
            self._add(kind, read, partition, origins)
        else:
            for number, file in files:
                self._add_file(number, file, kind, reading, partition)
        self._made.facts["numbers"] = sorted(self._numbers)

    def _add_file(
        self,
        number: int,
        file: TableFile,
        kind: Text,
        reading: Reading,
        partition: dict[str, str | None],
    ) -> None:
        spans, within, names_given = Spans(), self._piece.within, self._piece.names
        problems: dict[int, str] | None = {} if self._how.quarantine else None
        reading = reading._replace(problems=problems, spans=spans, within=within)
        if names_given and within is not None and within.begin:
            text = replace(reading.text, columns=names_given, header=False)
            reading = reading._replace(text=text)
        in_file = [*(reading.columns or ())]
        try:
            for read in kind.read(file.path, reading):
                kind.check_names(file.path, read[0], self._how.text, in_file)
                self._add(kind, read, partition, [(number, len(read[1]))], problems)
        except LineError as error:
            raise ValueError(f"{error}{LEAVES_OUT}") from error
        if within is not None:
            self._made.count_lines(spans.read)
        self._made.facts["notes"] += filter(None, [spans.note(file.path, self._how.text)])

    def _add(
        self,
        kind: Text,
        read: Rows,
        partition: dict[str, str | None],
        origins: list[tuple[int, int]],
        problems: dict[int, str] | None = None,
    ) -> None:
        """Adds rows as `Text.read` yields them."""
        names, lines, columns = read
        cells, rows, numbers = self._how.cells, len(lines), self._numbers
        self._made.known |= dict.fromkeys([*names, *partition])
        if not rows:
            return
        arrays = {name: kind.array(name, c, cells, self._how.text, numbers) for name, c in columns}
        arrays |= {name: pa.array([value] * rows) for name, value in partition.items()}
        made = [self._typed(name, arrays.get(name, pa.nulls(rows))) for name in self._how.columns]
        wrong = [problems.get(line) for line in lines.tolist()] if problems else pa.nulls(rows)
        made += [pa.array(lines, pa.int64()), pa.array(wrong, pa.string())]
        batch = pa.RecordBatch.from_arrays(made, [*self._how.columns, LINE, PROBLEM])
        self._made.add(batch, origins)

    def _typed(self, name: str, array: pa.Array) -> pa.Array:
        """Returns a column in the type that it has in every batch, unless it is of numbers."""
        cells = self._how.cells
        if name in self._floats:
            if (floats := floats_of(array)) is not None:
                return floats
            self._floats.remove(name)
        kind = cells.type_of(name)
        if pa.types.is_string(kind) and name not in cells.plain:
            kind = pa.dictionary(pa.int32(), kind)
        if array.type == kind:
            return array
        if pa.types.is_dictionary(kind):
            return array.cast(kind.value_type).dictionary_encode()
        return array.cast(kind)
