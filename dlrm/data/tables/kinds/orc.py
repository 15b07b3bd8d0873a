"""Files of ORC, as Hive, Trino and Spark write them."""

import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from dlrm.data.tables.kinds.columnar import Columnar, Group, Groups, slices
from dlrm.data.tables.kinds.types import is_text

_STRIPES, _OFFSET, _ROWS = 3, 1, 5  # fields of the footer and of a stripe in it
_LENGTHS = (2, 3, 4)  # of a stripe's index, data and footer
_VARINT, _BYTES = 0, 2  # types of fields
_MOST_SHIFTS = 63
_NO_TEXT = re.compile(rb"[\0-\x08\x0e-\x1f]")


class Orc(Columnar):
    """ORC, of which a stripe is read at a time, as pyarrow does."""

    name, title, group, magic = "orc", "ORC", "stripe", b"ORC"
    suffixes = (".orc",)

    def begins(self, start: bytes) -> bool:
        """Returns whether a file begins as ORC, and not as text with these letters."""
        return super().begins(start) and _NO_TEXT.search(start) is not None

    def groups_of(self, path: str | Path) -> Groups:
        """Opens a file; see `Columnar.groups_of`."""
        try:
            from pyarrow.orc import ORCFile
        except ImportError as error:  # some builds of pyarrow leave it out
            raise ValueError(f"{path}: expected a pyarrow with ORC, got none ({error})") from error
        return _Stripes(path, ORCFile(str(path)))


class _Stripes(Groups):
    def __init__(self, path: str | Path, file: Any) -> None:
        self._file, self._groups = file, _groups(path, file)
        self.schema, self.num_groups = file.schema, file.nstripes

    def batches(self, number: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        stripe = self._file.read_stripe(number, list(columns))
        arrays = [a.dictionary_encode() if is_text(a.type) else a for a in stripe.columns]
        yield from slices(pa.RecordBatch.from_arrays(arrays, stripe.schema.names))


def _groups(path: str | Path, file: Any) -> list[Group]:
    """Returns the rows and places of the stripes, which pyarrow does not tell, from the footer."""
    groups: list[Group] = []
    with open(path, "rb") as raw:
        raw.seek(-1 - file.file_postscript_length - file.file_footer_length, 2)
        footer = _unpacked(raw.read(file.file_footer_length), file)
    place = 0
    while len(groups) < file.nstripes:
        number, value, place = _field(footer, place)
        if number == _STRIPES and isinstance(value, bytes):
            groups.append(_group(value))
    if any(not 0 <= group.begin <= group.end <= file.file_length for group in groups) or (
        sum(group.rows for group in groups) != file.nrows
    ):
        raise pa.ArrowInvalid("stripes that are not within the file")
    return groups


def _group(stripe: bytes) -> Group:
    facts, place = dict[int, int](), 0
    while place < len(stripe):
        number, value, place = _field(stripe, place)
        if isinstance(value, int):
            facts[number] = value
    begin = facts.get(_OFFSET, 0)
    return Group(facts.get(_ROWS, 0), begin, begin + sum(facts.get(key, 0) for key in _LENGTHS))


def _field(message: bytes, place: int) -> tuple[int, int | bytes, int]:
    """Returns a field of a message of Protocol Buffers: its number, its value, and its end."""
    key, place = _varint(message, place)
    value, place = _varint(message, place)
    if key & 7 == _VARINT:
        return key >> 3, value, place
    if key & 7 != _BYTES or place + value > len(message):
        raise pa.ArrowInvalid("a footer of another form")
    return key >> 3, message[place : place + value], place + value


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, _MOST_SHIFTS + 1, 7):
        if place >= len(message):
            break
        byte = message[place]
        value, place = value | (byte & 127) << shift, place + 1
        if byte < 128:
            return value, place
    raise pa.ArrowInvalid("a footer that ends too early")


def _unpacked(packed: bytes, file: Any) -> bytes:
    """Returns the footer, which is compressed in chunks."""
    if file.compression == "UNCOMPRESSED":
        return packed
    content, place = b"", 0
    while place + 3 <= len(packed):
        header = int.from_bytes(packed[place : place + 3], "little")
        chunk = packed[place + 3 : place + 3 + (header >> 1)]
        place += 3 + (header >> 1)
        content += chunk if header & 1 else _decompressed(chunk, file)
    return content


def _decompressed(chunk: bytes, file: Any) -> bytes:
    """Returns a chunk, which other bytes may follow up to the size of a block."""
    if file.compression == "ZLIB":
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(chunk, file.compression_size)
    if file.compression == "ZSTD":
        return pa.CompressedInputStream(pa.BufferReader(chunk), "zstd").read(file.compression_size)
    codec = {"SNAPPY": "snappy", "LZ4": "lz4_raw"}.get(file.compression)
    if codec is None:
        raise pa.ArrowInvalid(f"the compression {file.compression}")
    return pa.decompress(chunk, file.compression_size, codec, asbytes=True)
