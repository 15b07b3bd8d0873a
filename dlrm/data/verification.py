"""Compares a dataset's files with the checksums of its manifest, when their bytes are first read.

Compared blocks are recorded beside the manifest or, if it is not writable, in the user's cache, and
are not compared again while a file keeps its size, time and inode. Only the standard library and
numpy are imported.
"""

import fcntl
import hashlib
import os
import time
import weakref
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.data.choices import VERIFY_DATA
from dlrm.files import MANIFEST, write_atomically
from dlrm.manifest import BLOCK_BYTES, damaged, read_manifest, read_sealed, sealed_json

MEMORY = ".verified.json"  # beside the manifest: file -> its compared blocks
_CACHE = Path("~/.cache/dlrm/verified")


class CheckedFile:
    """A file whose blocks are each compared with a checksum before they are read.

    Args:
        checksum: eight digits for each block; see `dlrm.manifest.Checksum`.
        entry: the recorded entry of the file, if any.
    """

    def __init__(self, path: Path, checksum: str, entry: list[Any] | None = None) -> None:
        self.path = path
        # Read now, so that a file that changes after its comparison does not match the entry.
        self._facts = _facts(path, checksum)
        known = int(entry[-1], 16) if entry and entry[:-1] == self._facts else 0
        self._sums = [checksum[place : place + 8] for place in range(0, len(checksum), 8)]
        self._size = path.stat().st_size
        known &= (1 << len(self._sums)) - 1
        bits = known.to_bytes(-(-len(self._sums) // 8), "little")
        flags = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
        self._left = set(np.flatnonzero(flags[: len(self._sums)] == 0).tolist())

    def entry(self) -> list[Any]:
        """Returns the entry to record.

        Size, time and inode of the file, a digest of its checksum and, as hexadecimal digits, a
        number whose bit k is set where block k was compared.
        """
        flags = np.ones(len(self._sums), np.uint8)
        flags[list(self._left)] = 0
        bits = np.packbits(flags, bitorder="little").tobytes()
        return [*self._facts, f"{int.from_bytes(bits, 'little'):x}"]

    @property
    def is_done(self) -> bool:
        """Returns whether all blocks were compared."""
        return not self._left

    def touch(self, begin: int, end: int) -> None:
        """Compares the blocks with bytes from `begin` to `end`; safe to call from several threads.

        Raises:
            ValueError: a block is damaged; the message names file and bytes.
        """
        if self._left and end > begin:
            first, last = begin // BLOCK_BYTES, (end - 1) // BLOCK_BYTES
            for block in range(first, last + 1):
                if block in self._left:
                    self._compare(block)

    def touch_all(self) -> None:
        """Compares the whole file; see `touch`."""
        self.touch(0, max(self._size, 1))

    def _compare(self, block: int) -> None:
        begin, crc = block * BLOCK_BYTES, 0
        left = min(BLOCK_BYTES, self._size - begin)
        with open(self.path, "rb") as file:
            status = os.fstat(file.fileno())
            if [status.st_size, status.st_ino] != [self._facts[0], self._facts[2]]:
                raise ValueError(f"{self.path}: was replaced by another file while it was read")
            file.seek(begin)
            while left > 0 and (part := file.read(min(left, BLOCK_BYTES))):
                crc, left = zlib.crc32(part, crc), left - len(part)
        if (actual := f"{crc:08x}") != self._sums[block]:
            raise damaged(self.path, self._sums[block], actual, block)
        self._left.discard(block)


class Verifier:
    """Checks files of a dataset, and records which were checked.

    A dataset without a manifest, written by other software, has no checksums to compare.

    Args:
        mode: "first" compares what is not recorded, "always" everything again, "never" nothing.
        allow_links: whether files may be symbolic links out of the directory.

    Raises:
        FileNotFoundError, ValueError: an unknown mode, or see `read_manifest`.
    """

    def __init__(
        self, directory: Path, kind: str, mode: str, allow_links: bool | None = False
    ) -> None:
        if mode not in VERIFY_DATA:
            raise ValueError(f"--verify_data {mode}: expected one of {', '.join(VERIFY_DATA)}")
        files: dict[str, Any] = {}
        if (directory / MANIFEST).exists():
            files = read_manifest(directory, kind, allow_links=allow_links)["files"]
        self._directory, self._mode = directory, mode
        self._checksums: dict[str, str] = {name: file["crc32"] for name, file in files.items()}
        self._memory = _Memory(directory) if mode == "first" and files else None
        self._known = self._memory.read() if self._memory else {}
        self._opened: dict[str, CheckedFile] = {}
        if self._memory:
            weakref.finalize(self, _remember, self._memory, self._opened)

    def open(self, path: Path) -> CheckedFile | None:
        """Returns the file to touch before its bytes are read; None if there is nothing to compare.

        Raises:
            ValueError: the manifest does not list the file.
        """
        if self._mode == "never" or not self._checksums:
            return None
        name = os.path.relpath(path, self._directory)
        if name not in self._checksums:
            raise ValueError(f"{path}: not in {self._directory / MANIFEST}, so nothing checks it")
        if name not in self._opened:
            known = self._known.get(name)
            self._opened[name] = CheckedFile(path, self._checksums[name], known)
        file = self._opened[name]
        return None if file.is_done else file

    def check(self, paths: Iterable[Path]) -> None:
        """Compares whole files, on all cores.

        Raises:
            ValueError: a file is damaged; the message names it.
        """
        files = [file for path in paths if (file := self.open(path))]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for _ in pool.map(lambda file: file.touch_all(), files):
                pass

    def check_names(self, *names: str) -> None:
        """Compares listed files, and all listed files below directories; see `check`."""
        folders = tuple(f"{name}/" for name in names)
        listed = [n for n in self._checksums if n in names or n.startswith(folders)]
        self.check(self._directory / name for name in listed)


def _facts(path: Path, checksum: str) -> list[Any]:
    """Returns the properties of a file that must be unchanged for its entry to hold."""
    status = path.stat()
    digest = f"{zlib.crc32(checksum.encode()):08x}"
    return [status.st_size, status.st_mtime_ns, status.st_ino, digest]


def _remember(memory: "_Memory", files: dict[str, CheckedFile]) -> None:
    """Records the comparisons."""
    entries = {name: file.entry() for name, file in files.items()}
    memory.add({name: entry for name, entry in entries.items() if entry[-1] != "0"})


class _Memory:
    """The file that records comparisons of a dataset: name -> size, time, inode, sum, blocks."""

    def __init__(self, directory: Path) -> None:
        directory = directory.resolve()
        self._places, self._manifest = [directory / MEMORY], directory / MANIFEST
        with suppress(RuntimeError):  # a user without a home
            digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:24]
            self._places.append(_CACHE.expanduser() / f"{digest}.json")

    def read(self) -> dict[str, list[Any]]:
        """Returns the record; it is empty if the file is unreadable or damaged."""
        known: dict[str, list[Any]] = {}
        for place in filter(Path.is_file, self._places):
            with suppress(OSError, ValueError, TypeError, KeyError):
                entries = read_sealed(place)
                del entries["own_crc32"]
                for name, (size, changed, inode, digest, blocks) in entries.items():
                    int(blocks, 16)
                    known[name] = [size, changed, inode, digest, blocks]
        return known

    def add(self, compared: dict[str, list[Any]]) -> None:
        """Adds entries in the first writable place; other processes may do so at the same time."""
        if not compared or not self._manifest.exists():
            return
        for place in self._places:
            with suppress(OSError):
                if place.parent != self._manifest.parent:
                    place.parent.mkdir(parents=True, exist_ok=True)
                with _locked(place.parent):
                    write_atomically(place, sealed_json(self._with(compared)))
                    return

    def _with(self, compared: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Returns the record with further entries."""
        known = self.read()
        for name, entry in compared.items():
            before = known.get(name, [])
            both = int(entry[-1], 16)
            if before[:-1] == entry[:-1]:
                both |= int(before[-1], 16)
            known[name] = [*entry[:-1], f"{both:x}"]
        return known


@contextmanager
def _locked(directory: Path):
    """Waits up to a second for other processes that add entries, which take less."""
    descriptor, end = os.open(directory, os.O_RDONLY), time.monotonic() + 1
    try:
        with suppress(OSError):  # a file system without locks
            while time.monotonic() < end:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)
