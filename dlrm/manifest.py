"""The manifest of a directory written by this package: its kind, files and checksums.

Only the standard library is imported.
"""

import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from dlrm.documents import (
    MAX_JSON_BYTES,
    MAX_YAML_BYTES,
    brief,
    json_text,
    parse_json,
    read_bytes,
    read_json,
)
from dlrm.files import MANIFEST, within, write_atomically

BLOCK_BYTES = 1 << 22  # of a file, each with its own checksum
_VERSION = 2
_SEAL = "own_crc32"
_OWN_SUM = re.compile(rb'("own_crc32": ")([0-9a-f]{8})("\n}\n)\Z')
_LINES_SUM = re.compile(rb"\A# CRC-32 of the lines below: ([0-9a-f]{8}); [^\n]*\n")
_ZEROED = rb"\g<1>00000000\g<3>"
_PREPARED_BY = {
    "image dataset": "dlrm prepare-images",
    "pre-training dataset": "dlrm prepare-text",
}


class Checksum:
    """CRC-32 of a file that is written or read in parts.

    A sum is eight hexadecimal digits for each block of `BLOCK_BYTES`, the last of which may be
    shorter; for a small file it is the CRC-32 of the whole.
    """

    def __init__(self) -> None:
        self._blocks: list[int] = []
        self._crc = self._bytes = 0

    def update(self, data: Any) -> None:
        """Adds the next bytes, of any object with a contiguous buffer."""
        view = memoryview(data)
        view = view.cast("B") if view.nbytes else view[:0]
        while len(view):
            part = view[: BLOCK_BYTES - self._bytes]
            self._crc = zlib.crc32(part, self._crc)
            self._bytes += len(part)
            view = view[len(part) :]
            if self._bytes == BLOCK_BYTES:
                self._blocks.append(self._crc)
                self._crc = self._bytes = 0

    def __str__(self) -> str:
        last = [self._crc] if self._bytes or not self._blocks else []
        return "".join(f"{crc:08x}" for crc in [*self._blocks, *last])


class JoinedChecksum:
    """The checksum of a file of which others have read the bytes, in slices.

    Args:
        name: the file, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name, self._blocks, self.size = name, list[int](), 0

    def add(self, place: int, size: int, sums: Sequence[int]) -> None:
        """Adds the next bytes of the file.

        Args:
            place: the first of them.
            size: their number.
            sums: the result of `slice_sums` for them.

        Raises:
            ValueError: bytes are missing before them, or there twice.
        """
        if place != self.size:
            raise ValueError(
                f"{self._name}: expected the bytes from {self.size} on, got those from {place} on"
            )
        for crc in sums:
            part = min(BLOCK_BYTES - self.size % BLOCK_BYTES, place + size - self.size)
            if self.size % BLOCK_BYTES:
                self._blocks[-1] = _product(_shift(part), self._blocks[-1]) ^ crc
            else:
                self._blocks.append(crc)
            self.size += part
        assert self.size == place + size, (self._name, place, size)

    def __str__(self) -> str:
        return "".join(f"{crc:08x}" for crc in self._blocks or [0])


def slice_sums(place: int, data: Any) -> list[int]:
    """Returns the CRC-32 of the part of each block of a file that some of its bytes are in.

    Args:
        place: the first of these bytes in the file.
    """
    view, sums = memoryview(data), list[int]()
    while len(view):
        part = BLOCK_BYTES - place % BLOCK_BYTES
        sums.append(zlib.crc32(view[:part]))
        view, place = view[part:], place + len(view[:part])
    return sums


def _product(first: int, other: int) -> int:
    """Multiplies two polynomials over GF(2) modulo that of CRC-32, with x^0 as the highest bit."""
    product, bit = 0, 1 << 31
    while first:
        if first & bit:
            product, first = product ^ other, first ^ bit
        bit, other = bit >> 1, other >> 1 ^ (0xEDB88320 if other & 1 else 0)
    return product


@lru_cache(maxsize=1 << 12)
def _shift(size: int) -> int:
    """Returns x^(8 size): the CRC-32 of bytes before `size` others is multiplied by it."""
    power, square, bits = 1 << 31, 1 << 30, 8 * size
    while bits:
        if bits & 1:
            power = _product(square, power)
        square, bits = _product(square, square), bits >> 1
    return power


def checksum(path: str | os.PathLike) -> str:
    """Returns the checksum of a file, in the form of `Checksum`."""
    result = Checksum()
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            result.update(block)
    return str(result)


def crc32(path: str | os.PathLike) -> str:
    """Returns the CRC-32 of a whole file as eight hexadecimal digits."""
    value = 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


def check_file(path: Path, expected: str) -> None:
    """Compares a file with its checksum.

    Args:
        expected: its checksum, in the form of `Checksum`.

    Raises:
        ValueError: it is damaged; the message names the file and the bytes.
    """
    if (actual := checksum(path)) != expected:
        raise damaged(path, expected, actual)


def damaged(
    path: str | os.PathLike, expected: str, actual: str, first_block: int = 0
) -> ValueError:
    """Returns the error of a file whose checksum is not the expected one.

    Args:
        path: the file, or its URI.
        expected, actual: sums of some blocks, or of the whole file.
        first_block: the number of the first of these blocks.
    """
    if len(expected) == len(actual) == 8 and not first_block:
        return ValueError(
            f"{path}: expected CRC-32 {expected}, got {actual}: damaged; copy or make it again"
        )
    pairs = (
        (expected[place : place + 8], actual[place : place + 8])
        for place in range(0, max(len(expected), len(actual)), 8)
    )
    block, (wanted, got) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    begin = (first_block + block) * BLOCK_BYTES
    return ValueError(
        f"{path}: bytes {begin} to {begin + BLOCK_BYTES - 1}: expected CRC-32 {wanted}, got "
        f"{got or 'none'}: damaged; copy or make it again"
    )


def check_files(directory: Path, expected: Mapping[str, str]) -> None:
    """Compares files with their checksums, on all cores.

    Args:
        expected: relative path -> checksum; see `check_file`.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        paths = [directory / name for name in expected]
        for _ in pool.map(check_file, paths, expected.values()):
            pass


def write_manifest(
    directory: Path, kind: str, checksums: Mapping[str, str] | None = None, **facts: Any
) -> None:
    """Writes `manifest.json`: `facts`, and size and checksum of every file. Call it last.

    Args:
        kind: "dataset" or "checkpoint".
        checksums: known sums of files, by relative path.
    """
    files = {}
    for path in sorted(
        p for p in directory.rglob("*") if p.is_file() and p != directory / MANIFEST
    ):
        name = path.relative_to(directory).as_posix()
        sums = (checksums or {}).get(name) or checksum(path)
        files[name] = {"bytes": path.stat().st_size, "crc32": sums}
    text = sealed_json({"kind": kind, "version": _VERSION, **facts, "files": files})
    write_atomically(directory / MANIFEST, text)


def _are_sums(sums: Any, size: int) -> bool:
    """Returns whether a value can be the checksum of a file of that size."""
    if not isinstance(sums, str) or not re.fullmatch(r"([0-9a-f]{8})+", sums):
        return False
    return len(sums) // 8 == max(1, -(-size // BLOCK_BYTES))


def sealed_json(entries: Mapping[str, Any]) -> str:
    """Returns JSON of a map with its own checksum as the last entry, `own_crc32`."""
    kept = {name: value for name, value in entries.items() if name != _SEAL}
    zeroed = json_text({**kept, _SEAL: "0" * 8}, indent=2) + "\n"
    return f"{zlib.crc32(zeroed.encode()):08x}".join(zeroed.rsplit("0" * 8, 1))


def read_sealed(path: Path, required: bool = False) -> dict[str, Any]:
    """Reads a file with a map and, if `sealed_json` wrote it, compares it with its checksum.

    Args:
        required: whether a file without a checksum is damaged.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a map, or is damaged; the message names the file.
    """
    return parse_sealed(read_bytes(path, MAX_JSON_BYTES), path, required)


def parse_sealed(
    content: bytes, source: str | os.PathLike, required: bool = False
) -> dict[str, Any]:
    """Returns the map of a file that is in memory; see `read_sealed`.

    Args:
        source: its path or URI, for messages.
        required: see `read_sealed`.
    """
    stored = _OWN_SUM.search(content)
    if stored is not None:
        expected = stored[2].decode()
        actual = f"{zlib.crc32(_OWN_SUM.sub(_ZEROED, content)):08x}"
        if actual != expected:
            raise damaged(source, expected, actual)
    entries = parse_json(content, source)
    if stored is None and (required or _SEAL in entries):
        raise ValueError(f"{source}: expected the checksum {_SEAL} at its end: damaged")
    return entries


def sealed_lines(text: str) -> str:
    """Returns lines for programs and for people, after their checksum as a comment."""
    sums = f"{zlib.crc32(text.encode()):08x}"
    return f"# CRC-32 of the lines below: {sums}; delete this line if you edit them\n{text}"


def check_lines(path: str | os.PathLike) -> None:
    """Compares a file of `sealed_lines` with its checksum; files without one pass.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or was edited without removing the comment.
    """
    content = read_bytes(path, MAX_YAML_BYTES)
    if (comment := _LINES_SUM.search(content)) is not None:
        actual = f"{zlib.crc32(content[comment.end() :]):08x}"
        if actual != comment[1].decode():
            error = damaged(Path(path), comment[1].decode(), actual)
            raise ValueError(f"{error}; delete the first line of a file that you have edited")
    elif b"# CRC-32 of the lines below" in content:
        raise ValueError(
            f"{path}: expected the checksum in a first line of its own: damaged; copy or make it "
            "again; delete that line of a file that you have edited"
        )


def read_manifest(
    directory: Path,
    kind: str,
    check_crc: bool = False,
    wanted: Callable[[str], bool] = lambda name: True,
    allow_links: bool | None = None,
) -> dict[str, Any]:
    """Reads `manifest.json`, and checks the existence and size of every listed file.

    Args:
        kind: expected kind: "dataset" or "checkpoint".
        check_crc: also read every file and compare its checksum.
        wanted: files, by relative path, to read for that.
        allow_links: whether files may be symbolic links out of the directory; see `within`.

    Raises:
        FileNotFoundError: there is no manifest, or a listed file is missing.
        ValueError: it is damaged or of another kind or version, or a file has another size or sum,
            or is outside the directory.
    """
    path = directory / MANIFEST
    if not path.is_file():
        made_by = f"; {_PREPARED_BY[kind]} makes one" if kind in _PREPARED_BY else ""
        raise FileNotFoundError(
            f"{path}: no such file, so {directory} is not a complete {kind}{made_by}"
        )
    manifest, files = _read_entries(path, kind)
    for name, (expected_bytes, _) in files.items():
        file = within(directory, name, path, allow_links)
        if not file.is_file():
            raise FileNotFoundError(f"{file}: missing, though {path} names it")
        if (size := file.stat().st_size) != expected_bytes:
            raise ValueError(f"{file}: expected {expected_bytes} bytes, got {size}")
    if check_crc:
        check_files(directory, {name: sums for name, (_, sums) in files.items() if wanted(name)})
    return manifest


def files_of(manifest: Mapping[str, Any], where: str) -> dict[str, tuple[int, str]]:
    """Returns the sizes and checksums of the files that a manifest lists, by name.

    Raises:
        ValueError: they are damaged; the message has `where`.
    """
    try:
        files = {name: (f["bytes"], f["crc32"]) for name, f in manifest["files"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}: not a manifest ({error!r})") from error
    for name, (size, sums) in files.items():
        if type(size) is not int or not _are_sums(sums, size):
            raise ValueError(
                f"{where}: {name}: expected a number of bytes, and eight hexadecimal digits for "
                f"each {BLOCK_BYTES} bytes, got {brief(size)} and "
                f"{brief(sums)}"
            )
    return files


def check_listed(directory: Path, folder: str) -> None:
    """Compares the names of the files in a folder of a directory with the directory's manifest.

    A file that was added has no checksum. Directories without a manifest pass.

    Raises:
        ValueError: a file is not listed; it is named.
    """
    if (directory / MANIFEST).is_file():
        listed = read_json(directory / MANIFEST)["files"]
        for path in (directory / folder).rglob("*"):
            if path.is_file() and path.relative_to(directory).as_posix() not in listed:
                raise ValueError(f"{path}: not in {directory / MANIFEST}, so nothing checks it")


def _read_entries(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, tuple[int, str]]]:
    """Returns a manifest and, by name, the sizes and checksums of its files, after checks."""
    try:
        manifest = read_sealed(path, required=True)
        actual_kind, version = manifest["kind"], manifest["version"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a manifest ({error!r})") from error
    files = files_of(manifest, str(path))
    if actual_kind != kind or version != _VERSION:
        raise ValueError(
            f"{path}: expected a {kind} of version {_VERSION}, got a {actual_kind} of version "
            f"{version}"
        )
    return manifest, files
