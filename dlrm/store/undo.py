"""Undo files: what records were before they were first overwritten after a checkpoint.

`undo-<n>.bin` begins when checkpoint n of a store is made. It has a header, then chunks of entries:
the number of a record and its content as checkpoint n has it. Where a process is killed, the last
chunk may be cut; its records have not been overwritten then.
"""

import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dlrm.documents import parse_json
from dlrm.files import sync, write_atomically

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


def undo_path(directory: Path, number: int) -> Path:
    """Returns where the undo file of a generation is."""
    return directory / f"undo-{number:09d}.bin"


def undo_numbers(directory: Path) -> list[int]:
    """Returns the generations of which a store has undo files, in order."""
    names = (path.stem.removeprefix("undo-") for path in directory.glob("undo-*.bin"))
    return sorted(int(name) for name in names if name.isdecimal())


def new_undo(directory: Path, store: str, generation: Generation) -> int:
    """Makes the undo file of a generation, which replaces an earlier one; returns a descriptor."""
    path = undo_path(directory, generation.number)
    header = json.dumps(
        {"store": store, "generation": generation.number, "token": generation.token}
    )
    write_atomically(path, header.ljust(HEADER - 1) + "\n")
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def remove_undo(directory: Path, numbers: list[int]) -> None:
    """Removes undo files, the newest first, so that what a kill leaves of them has no gap."""
    for number in sorted(numbers, reverse=True):
        undo_path(directory, number).unlink()
        sync(directory)


def token_of(path: Path, store: str) -> str:
    """Returns the token of the generation that an undo file is of.

    Raises:
        ValueError: the file is damaged, or of another store.
    """
    try:
        with open(path, "rb") as file:
            header = parse_json(file.read(HEADER), path)
        owner, token = header["store"], str(header["token"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: damaged: expected the header of an undo file") from error
    if owner != store:
        raise ValueError(f"{path}: expected an undo file of the store {store}, got {owner}'s")
    return token


def entries(
    path: Path, file: int, record_bytes: int, records: int, start: int = HEADER
) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Yields the records of a chunk, where their content is in the file, and the chunk's end.

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
