"""Files and streams of Arrow, as Polars, pandas (Feather) and Arrow itself write them."""

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from dlrm.data.tables.kinds.columnar import Columnar, Group, Groups, slices
from dlrm.data.tables.kinds.types import plain_array, plain_field, text_as_bytes

_STREAM = b"\xff\xff\xff\xff"  # before each message, also in a file
_BATCHES, _HEADER, _LENGTH = 3, 2, 0  # fields of a footer, of a message and of a record batch
_TAIL = 10  # bytes at the end of a file: the length of its footer, and the magic


class ArrowIpc(Columnar):
    """Arrow's own format, whose files and streams are mapped into memory."""

    name, title, group, magic = "arrow", "Arrow", "record batch", b"ARROW1"
    suffixes = (".arrow", ".feather", ".ipc", ".arrows")

    def begins(self, start: bytes) -> bool:
        """Returns whether a file begins as a file or a stream."""
        return start.startswith((self.magic, _STREAM))

    def groups_of(self, path: str | Path) -> Groups:
        """Opens a file or a stream; see `Columnar.groups_of`."""
        mapped = pa.memory_map(str(path))
        if not mapped.size():
            raise pa.ArrowInvalid("0 bytes")
        is_file = mapped.size() > _TAIL and mapped.read_at(len(self.magic), 0) == self.magic
        return _File(mapped) if is_file else _Stream(mapped)


class _Batches(Groups):
    """Record batches, to which the bytes before them are counted, such as dictionaries."""

    def __init__(self, mapped: pa.MemoryMappedFile, schema: pa.Schema) -> None:
        self._mapped, self.schema = mapped, schema
        self._groups: list[Group] = []

    def batches(self, number: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        places = [i for i, name in enumerate(self.schema.names) if name in columns]
        options = pa.ipc.IpcReadOptions(included_fields=places)
        batch = self._batch(number, options)
        for array in batch.columns:  # whose offsets and indices nothing has checked yet
            array.view(text_as_bytes(array.type)).validate(full=True)
        schema = pa.schema([plain_field(field) for field in batch.schema])
        for part in slices(batch):
            arrays = map(plain_array, part.columns, schema.types)
            yield pa.RecordBatch.from_arrays(list(arrays), schema=schema)

    def _batch(self, number: int, options: pa.ipc.IpcReadOptions) -> pa.RecordBatch:
        raise NotImplementedError


class _File(_Batches):
    def __init__(self, mapped: pa.MemoryMappedFile) -> None:
        super().__init__(mapped, pa.ipc.open_file(mapped).schema)
        try:
            self._groups = self._found()
        except (struct.error, IndexError) as error:
            raise pa.ArrowInvalid(f"its footer has another form: {error}") from error
        self.num_groups = len(self._groups)
        self._open: tuple[list[int], pa.RecordBatchFileReader] | None = None

    def _found(self) -> list[Group]:
        """Returns the rows and places of the record batches, which pyarrow does not tell."""
        size, groups, last = self._mapped.size(), list[Group](), 0
        (length,) = struct.unpack("<i", self._mapped.read_at(4, size - _TAIL))
        footer = self._mapped.read_at(length, size - _TAIL - length)
        batches = _field(footer, _target(footer, 0), _BATCHES)
        vector = None if batches is None else _target(footer, batches)
        for i in range(0 if vector is None else _unsigned(footer, vector)):
            assert vector is not None
            place, metadata, body = struct.unpack_from("<qi4xq", footer, vector + 4 + 24 * i)
            end = place + metadata + body
            if not 0 <= place <= end <= size:
                raise pa.ArrowInvalid("record batches that are not within the file")
            message = self._mapped.read_at(metadata, place)
            message = message[8:] if message.startswith(_STREAM) else message[4:]
            groups.append(Group(_rows(message), min(last, place), end))
            last = end
        return groups

    def _batch(self, number: int, options: pa.ipc.IpcReadOptions) -> pa.RecordBatch:
        if self._open is None or self._open[0] != options.included_fields:
            reader = pa.ipc.open_file(self._mapped, options=options)
            self._open = options.included_fields, reader
        return self._open[1].get_batch(number)


class _Stream(_Batches):
    """A stream, whose messages are found by reading it once.

    A record batch is read from a stream of its own, with the dictionaries before it.
    """

    def __init__(self, mapped: pa.MemoryMappedFile) -> None:
        super().__init__(mapped, pa.ipc.open_stream(mapped).schema)
        self._heads: list[tuple[int, int]] = []  # places of the schema and of dictionaries
        self._places: list[list[tuple[int, int]]] = []  # what is read for each record batch
        mapped.seek(0)
        last = end_of_group = 0
        for message in pa.ipc.MessageReader.open_stream(mapped):
            place = (last, last := mapped.tell())
            if message.type == "record batch":
                self._places.append([*self._heads, place])
                self._groups.append(Group(_rows(message.metadata.to_pybytes()), end_of_group, last))
                end_of_group = last
            else:
                self._heads.append(place)
        self.num_groups = len(self._groups)
        if mapped.tell() == last:
            raise pa.ArrowInvalid("the stream has no end; its writer was not closed")
        if mapped.tell() < mapped.size():
            raise pa.ArrowInvalid(f"{mapped.size() - mapped.tell()} bytes after the stream's end")

    def _batch(self, number: int, options: pa.ipc.IpcReadOptions) -> pa.RecordBatch:
        places = self._places[number]
        stream = b"".join(self._mapped.read_at(end - begin, begin) for begin, end in places)
        return pa.ipc.open_stream(stream, options=options).read_next_batch()


def _rows(message: bytes) -> int:
    """Returns the number of rows of a message's record batch."""
    try:
        header = _field(message, _target(message, 0), _HEADER)
        length = None if header is None else _field(message, _target(message, header), _LENGTH)
        rows: int = 0 if length is None else struct.unpack_from("<q", message, length)[0]
    except struct.error as error:
        raise pa.ArrowInvalid(f"a message of another form: {error}") from error
    if rows < 0:
        raise pa.ArrowInvalid(f"a record batch of {rows} rows")
    return rows


def _field(data: bytes, table: int, number: int) -> int | None:
    """Returns the place of a field of a table of FlatBuffers; None if it has the default."""
    (back,) = struct.unpack_from("<i", data, table)
    (size,) = struct.unpack_from("<H", data, table - back)
    if 4 + 2 * number >= size:
        return None
    (offset,) = struct.unpack_from("<H", data, table - back + 4 + 2 * number)
    return table + offset if offset else None


def _target(data: bytes, place: int) -> int:
    """Returns the place that an offset points to."""
    return place + _unsigned(data, place)


def _unsigned(data: bytes, place: int) -> int:
    return int(struct.unpack_from("<I", data, place)[0])
