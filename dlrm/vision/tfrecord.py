"""Reads TFRecord files of tf.train.Example without TensorFlow.

A file is a sequence of: length (8 bytes), masked CRC-32C of these, data, masked CRC-32C of the
data (4 bytes each, little-endian).
"""

import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory, text_format

_HEADER, _SUM = struct.Struct("<QI"), struct.Struct("<I")
_REPEATED, _OPTIONAL = "label: LABEL_REPEATED", "label: LABEL_OPTIONAL"
# The parts of TensorFlow's example.proto and feature.proto that images need; an entry is of a map.
_PROTO = f"""
name: "dlrm/example.proto" package: "dlrm"
message_type {{ name: "Bytes" field {{ name: "value" number: 1 type: TYPE_BYTES {_REPEATED} }} }}
message_type {{ name: "Integers" field {{ name: "value" number: 1 type: TYPE_INT64 {_REPEATED} }} }}
message_type {{ name: "Feature"
  field {{ name: "bytes_list" number: 1 type_name: ".dlrm.Bytes" {_OPTIONAL} }}
  field {{ name: "int64_list" number: 3 type_name: ".dlrm.Integers" {_OPTIONAL} }} }}
message_type {{ name: "Entry"
  field {{ name: "name" number: 1 type: TYPE_BYTES {_OPTIONAL} }}
  field {{ name: "value" number: 2 type_name: ".dlrm.Feature" {_OPTIONAL} }} }}
message_type {{ name: "Features" field {{ name: "feature" number: 1 type_name: ".dlrm.Entry"
  {_REPEATED} }} }}
message_type {{ name: "Example" field {{ name: "features" number: 1 type_name: ".dlrm.Features"
  {_OPTIONAL} }} }}
"""


class Record(NamedTuple):
    """Position of a record's data in its file."""

    number: int
    offset: int
    length: int


def masked_crc32c(data: bytes) -> int:
    """Returns the masked CRC-32C of some bytes, as TFRecord files store it."""
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
            where = f"{path}: record {number}"
            if len(header) < _HEADER.size:
                raise ValueError(f"{where}: the file ends within its length")
            length, crc = _HEADER.unpack(header)
            if masked_crc32c(header[:8]) != crc:
                raise ValueError(f"{where}: its length is damaged (CRC-32C)")
            record = Record(number, start + _HEADER.size, length)
            start = record.offset + length + _SUM.size
            if start > size:
                raise ValueError(f"{where}: expected {length} bytes, the file ends within them")
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

    Lists of floats are empty.

    Raises:
        ValueError: the bytes are not a tf.train.Example.
    """
    try:
        entries = _example().FromString(data).features.feature
    except message.DecodeError as error:
        raise ValueError(f"not a tf.train.Example: {error}") from error
    return {
        entry.name.decode("utf-8", "replace"): [
            *entry.value.bytes_list.value,
            *entry.value.int64_list.value,
        ]
        for entry in entries
    }


@cache
def _example() -> Any:
    """Returns the class of tf.train.Example."""
    file = text_format.Parse(_PROTO, descriptor_pb2.FileDescriptorProto())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("dlrm.Example"))
