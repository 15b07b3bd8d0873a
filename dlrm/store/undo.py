"""Undo files: the content of records before they were first overwritten after a checkpoint.

`undo-<n>.bin` begins when checkpoint n of a store is made. It has a header, then chunks of entries:
the number of a record and its content as checkpoint n has it. Where a process is killed, the last
chunk may be cut; its records have not been overwritten then. The header has the size of the file of
checkpoint n - 1, to which nothing more is added.
"""

import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.documents import parse_json
from dlrm.files import write_atomically
from dlrm.locks import sync

HEADER = 512
_CHUNK = struct.Struct("<4sIII")
_MAGIC = b"UNDO"


@dataclass(frozen=True)
class Generation:
    """A checkpoint of a store.

    Attributes:
        number: counted from 1.
        token: distinguishes it from others of this number.
    """

    number: int
    token: str

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> "Generation":
        """Returns the generation of a checkpoint's record."""
        return cls(int(entry["generation"]), str(entry["token"]))


def undo_path(directory: Path, number: int) -> Path:
    """Returns the path of a generation's undo file."""
    return directory / f"undo-{number:09d}.bin"


def undo_numbers(directory: Path) -> list[int]:
    """Returns the generations whose undo files a store has, in order."""
    names = (path.stem.removeprefix("undo-") for path in directory.glob("undo-*.bin"))
    return sorted(int(name) for name in names if name.isdecimal())


def new_undo(directory: Path, store: str, generation: Generation) -> int:
    """Creates the undo file of a generation, replacing an earlier one; returns a descriptor."""
    path, earlier = (undo_path(directory, generation.number - back) for back in (0, 1))
    size = earlier.stat().st_size if earlier.exists() else None
    header = json.dumps(
        {
            "store": store,
            "generation": generation.number,
            "token": generation.token,
            "earlier_bytes": size,
        }
    )
    write_atomically(path, header.ljust(HEADER - 1) + "\n")
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def remove_undo(directory: Path, numbers: list[int]) -> None:
    """Removes undo files, the newest first, so that a kill in between leaves no gap."""
    for number in sorted(numbers, reverse=True):
        undo_path(directory, number).unlink()
        sync(directory)


def undo_since(directory: Path, store: str, generation: Generation) -> list[int]:
    """Returns the generations from a given one on, all of which have undo files."""
    path = undo_path(directory, generation.number)
    numbers = [n for n in undo_numbers(directory) if n >= generation.number]
    whole = numbers == list(range(generation.number, generation.number + len(numbers)))
    if not numbers or not whole or str(_header(path, store)["token"]) != generation.token:
        raise ValueError(
            f"{path}: expected what undoes the changes since checkpoint {generation.number} of the "
            "store, got none: its rows are gone"
        )
    return numbers


def check_whole(directory: Path, store: str, numbers: list[int]) -> None:
    """Checks that undo files, but for the newest, are as long as when the next one was made.

    Raises:
        ValueError: one is not; the message names it.
    """
    for number, following in pairwise(numbers):
        path = undo_path(directory, number)
        expected = _header(undo_path(directory, following), store).get("earlier_bytes")
        if expected is not None and (size := path.stat().st_size) != expected:
            raise ValueError(f"{path}: expected {expected} bytes, got {size}: damaged")


def _header(path: Path, store: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            header = parse_json(file.read(HEADER), path)
        owner, _ = header["store"], header["token"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: damaged: expected the header of an undo file") from error
    if owner != store:
        raise ValueError(f"{path}: expected an undo file of the store {store}, got {owner}'s")
    return header


def unfinished(path: Path, file: int, record_bytes: int, records: int) -> list[int]:
    """Returns the records of the last chunk where it is cut; they have not been overwritten.

    Raises:
        ValueError: the file is damaged.
    """
    start = HEADER
    for _, _, end in entries(path, file, record_bytes, records):
        start = end
    entry, begin = 8 + record_bytes, start + _CHUNK.size
    if os.pread(file, 4, start) != _MAGIC:
        return []
    whole = max(os.fstat(file).st_size - begin, 0) // entry
    numbers = (os.pread(file, 8, begin + i * entry) for i in range(whole))
    return [number for number in (int.from_bytes(b, "little") for b in numbers) if number < records]


def entries(
    path: Path, file: int, record_bytes: int, records: int, start: int = HEADER
) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Yields the records of a chunk, the offsets of their content, and the chunk's end.

    Raises:
        ValueError: the file is damaged.
    """
    size, entry = os.fstat(file).st_size, 8 + record_bytes
    while start + _CHUNK.size <= size:
        magic, count, _, _ = _CHUNK.unpack(os.pread(file, _CHUNK.size, start))
        begin = start + _CHUNK.size
        start = begin + count * entry
        if magic == bytes(4):  # the machine stopped before it was on the disk
            return
        if magic != _MAGIC:
            raise ValueError(f"{path}: damaged at byte {begin - _CHUNK.size}")
        if start > size:
            return
        chunk = np.frombuffer(os.pread(file, count * entry, begin), np.uint8).reshape(count, entry)
        numbers = np.ascontiguousarray(chunk[:, :8]).view("<i8")[:, 0]
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < records:
            raise ValueError(f"{path}: damaged: expected records below {records}")
        yield numbers.astype(np.int64), begin + 8 + entry * np.arange(count, dtype=np.int64), start
