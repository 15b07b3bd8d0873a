"""Reads TFRecord files of tf.train.Example without TensorFlow.

A file is a sequence of: length (8 bytes), masked CRC-32C of these, data, masked CRC-32C of the
data (4 bytes each, little-endian). `google-crc32c` (extra `images`) computes the sums.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_HEADER, _SUM = struct.Struct("<QI"), struct.Struct("<I")


class Record(NamedTuple):
    """Position of a record's data in its file."""

    number: int
    offset: int
    length: int


def masked_crc32c(data: bytes) -> int:
    """Returns the masked CRC-32C of some bytes, as TFRecord files store it."""
    import google_crc32c

    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def find_records(path: str | Path) -> Iterator[Record]:
    """Yields the positions of a file's records, without reading their data.

    Raises:
        ValueError: a length is damaged or the file ends within a record; the message has the place.
    """
    size = Path(path).stat().st_size
    with open(path, "rb") as file:
        start, number = 0, 0
        while header := file.read(_HEADER.size):
            if len(header) < _HEADER.size:
                raise ValueError(f"{path}: record {number}: the file ends within its length")
            length, crc = _HEADER.unpack(header)
            if masked_crc32c(header[:8]) != crc:
                raise ValueError(f"{path}: record {number}: its length is damaged (CRC-32C)")
            record = Record(number, start + _HEADER.size, length)
            start = record.offset + length + _SUM.size
            if start > size:
                raise ValueError(
                    f"{path}: record {number}: expected {length} bytes, the file ends within them"
                )
            yield record
            file.seek(start)
            number += 1


def read_record(path: str | Path, record: Record) -> bytes:
    """Returns the data of a record, or raises ValueError if they are damaged."""
    with open(path, "rb") as file:
        file.seek(record.offset)
        data, crc = file.read(record.length), file.read(_SUM.size)
    if crc != _SUM.pack(masked_crc32c(data)):
        raise ValueError("damaged (CRC-32C)")
    return data


def parse_example(data: bytes) -> dict[str, list[Any]]:
    """Returns the features of a serialized tf.train.Example: name -> bytes or integers.

    Lists of floats are left out.

    Raises:
        ValueError: the bytes are not a tf.train.Example.
    """
    features: dict[str, list[Any]] = {}
    for message in _messages(data, 1):  # Example.features
        for entry in _messages(message, 1):  # Features.feature, a map
            names, values = _messages(entry, 1), _messages(entry, 2)
            if len(names) != 1 or len(values) != 1:
                raise ValueError("not a tf.train.Example: a feature without name or value")
            name = names[0].decode("utf-8", "replace")
            for kind, value in _fields(values[0]):
                if kind == 1:
                    features[name] = _messages(value, 1)
                elif kind == 3:
                    features[name] = _integers(value)
    return features


def _messages(data: bytes | int, number: int) -> list[bytes]:
    """Returns the length-delimited fields of a message with a given number."""
    return [value for n, value in _fields(data) if n == number and isinstance(value, bytes)]


def _integers(data: bytes | int) -> list[int]:
    """Returns the integers of an Int64List, packed or not."""
    numbers: list[int] = []
    for number, value in _fields(data):
        if number == 1 and isinstance(value, int):
            numbers.append(value)
        elif number == 1 and isinstance(value, bytes):
            place = 0
            while place < len(value):
                integer, place = _varint(value, place)
                numbers.append(integer)
    return [n - (1 << 64) if n >> 63 else n for n in numbers]


def _fields(data: bytes | int) -> Iterator[tuple[int, bytes | int]]:
    """Yields the number and value of each field of a protocol-buffers message."""
    if isinstance(data, int):
        raise ValueError("not a tf.train.Example: a number where a message belongs")
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        number, wire = tag >> 3, tag & 7
        if wire not in (0, 1, 2, 5):
            raise ValueError(f"not a tf.train.Example: wire type {wire}")
        length = {1: 8, 5: 4}.get(wire)
        if length is None:
            length, place = _varint(data, place)
        if wire == 0:
            yield number, length
            continue
        if place + length > len(data):
            raise ValueError("not a tf.train.Example: it ends within a field")
        yield number, data[place : place + length]
        place += length


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """Returns a number with 7 bits per byte, lowest first, and the position after it."""
    value = shift = 0
    while place < len(data) and shift < 64:
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
        shift += 7
    raise ValueError("not a tf.train.Example: it ends within a number")
