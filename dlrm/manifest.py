"""The manifest of a directory written by this package: its kind, files and checksums."""

import hashlib
import os
import re
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dlrm.documents import MAX_JSON_BYTES, brief, json_text, parse_json, read_bytes, read_json
from dlrm.files import MANIFEST, within, write_atomically

BLOCK_BYTES = 1 << 22  # of a file, each with its own checksum
_VERSION = 2
_SEAL = "own_crc32"
_OWN_SUM = re.compile(rb'("own_crc32": ")([0-9a-f]{8})("\n}\n)\Z')
_ZEROED = rb"\g<1>00000000\g<3>"


class Checksum:
    """CRC-32 of a file that is written or read in parts.

    As text it has eight hexadecimal digits for each block of `BLOCK_BYTES`, the last of which may
    be shorter; for a small file it is the CRC-32 of the whole.

    Args:
        begin: the first byte of the file to count, for a slice that `join` adds to what is before.

    Attributes:
        begin, end: the first byte, and the one after the last.
    """

    def __init__(self, begin: int = 0) -> None:
        self.begin = self.end = begin
        self._blocks = [0] if begin % BLOCK_BYTES else list[int]()

    def update(self, data: Any) -> None:
        """Adds the next bytes, of any object with a contiguous buffer."""
        view = memoryview(data)
        view = view.cast("B") if view.nbytes else view[:0]
        while len(view):
            part = view[: self._enter_block(len(view))]
            self._blocks[-1] = zlib.crc32(part, self._blocks[-1])
            view = view[len(part) :]

    def join(self, other: "Checksum", name: str) -> None:
        """Adds a slice of the file that others have read.

        Args:
            name: the file, for the message.

        Raises:
            ValueError: bytes are missing before the slice, or there twice.
        """
        if other.begin != self.end:
            raise ValueError(
                f"{name}: expected the bytes from {self.end} on, got those from {other.begin} on"
            )
        for crc in other._blocks:
            zeros = bytes(self._enter_block(other.end - self.end))
            # CRC-32 is linear: what follows changes the sum of what is before as zeros would.
            self._blocks[-1] = crc ^ zlib.crc32(zeros, self._blocks[-1]) ^ zlib.crc32(zeros)

    def _enter_block(self, size: int) -> int:
        """Moves the end by at most `size` bytes, within one block; returns their number."""
        if self.end % BLOCK_BYTES == 0:
            self._blocks.append(0)
        size = min(size, BLOCK_BYTES - self.end % BLOCK_BYTES)
        self.end += size
        return size

    def __str__(self) -> str:
        return "".join(f"{crc:08x}" for crc in self._blocks or [0])


def checksum(path: str | os.PathLike) -> str:
    """Returns the checksum of a file, in the form of `Checksum`."""
    result = Checksum()
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            result.update(block)
    return str(result)


def damaged(path: str | os.PathLike, expected: str, actual: str) -> ValueError:
    """Returns the error of a file, or URI, whose checksum is not the expected one."""
    places = range(0, max(len(expected), len(actual)), 8)
    sums = [(expected[i : i + 8], actual[i : i + 8] or "none") for i in places]
    block, (wanted, got) = next((i, pair) for i, pair in enumerate(sums) if pair[0] != pair[1])
    begin = block * BLOCK_BYTES
    where = f"bytes {begin} to {begin + BLOCK_BYTES - 1}: " if len(sums) > 1 else ""
    return ValueError(
        f"{path}: {where}expected CRC-32 {wanted}, got {got}: damaged; copy or make it again"
    )


def check_files(directory: Path, expected: Mapping[str, str]) -> None:
    """Compares files with their checksums, on all cores.

    Args:
        expected: relative path -> checksum, in the form of `Checksum`.

    Raises:
        ValueError: a file is damaged; the message names the file and the bytes.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(checksum, [directory / name for name in expected])
        for (name, sums), actual in zip(expected.items(), found, strict=True):
            if actual != sums:
                raise damaged(directory / name, sums, actual)


def write_manifest(
    directory: Path, kind: str, checksums: Mapping[str, str] | None = None, **facts: Any
) -> None:
    """Writes `manifest.json`: `facts`, and size and checksum of every file. Call it last.

    Args:
        kind: "dataset" or "checkpoint".
        checksums: known sums of files, by relative path.
    """
    files = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        if (name := path.relative_to(directory).as_posix()) != MANIFEST:
            sums = (checksums or {}).get(name) or checksum(path)
            files[name] = {"bytes": path.stat().st_size, "crc32": sums}
    text = sealed_json({"kind": kind, "version": _VERSION, **facts, "files": files})
    write_atomically(directory / MANIFEST, text)


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
        raise FileNotFoundError(f"{path}: no such file, so {directory} is not a complete {kind}")
    manifest = read_sealed(path, required=True)
    files = files_of(manifest, str(path))
    found, version = manifest.get("kind"), manifest.get("version")
    if found != kind or version != _VERSION:
        raise ValueError(
            f"{path}: expected a {kind} of version {_VERSION}, got a {found} of version {version}"
        )
    for name, (expected_bytes, _) in files.items():
        file = within(directory, name, path, allow_links)
        if not file.is_file():
            raise FileNotFoundError(f"{file}: missing, though {path} names it")
        if (size := file.stat().st_size) != expected_bytes:
            raise ValueError(f"{file}: expected {expected_bytes} bytes, got {size}")
    if check_crc:
        check_files(directory, {name: sums for name, (_, sums) in files.items() if wanted(name)})
    return manifest


def digest(directory: str | os.PathLike) -> str | None:
    """Returns the SHA-256 of a directory's manifest; None if it has none."""
    path = Path(directory, MANIFEST)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


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
        digits = 8 * max(1, -(-size // BLOCK_BYTES)) if type(size) is int else 0
        is_sum = isinstance(sums, str) and re.fullmatch("[0-9a-f]+", sums)
        if not is_sum or len(sums) != digits:
            raise ValueError(
                f"{where}: {name}: expected a number of bytes, and eight hexadecimal digits for "
                f"each {BLOCK_BYTES} bytes, got {brief(size)} and {brief(sums)}"
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
    """
    if stored := _OWN_SUM.search(content):
        expected = stored[2].decode()
        actual = f"{zlib.crc32(_OWN_SUM.sub(_ZEROED, content)):08x}"
        if actual != expected:
            raise damaged(source, expected, actual)
    entries = parse_json(content, source)
    if stored is None and (required or _SEAL in entries):
        raise ValueError(f"{source}: expected the checksum {_SEAL} at its end: damaged")
    return entries
