"""Text files of any encoding, plain or compressed, as bytes and as lines."""

import bz2
import codecs
import gzip
import io
import itertools
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from dlrm.data.sources.text_format import TextFormat

PACKED = (".gz", ".bz2", ".xz", ".zst")
BROKEN = (EOFError, OSError, zlib.error, lzma.LZMAError)  # what a damaged archive raises
LONGEST_LINE = 1 << 24  # bytes, or characters
_PACKED_BYTES = 1 << 18
_MAGIC = {
    "gzip": (b"\x1f\x8b",),
    "bz2": tuple(b"BZh%d1AY&SY" % level for level in range(1, 10)),
    "xz": (b"\xfd7zXZ\0",),
    "zstd": (b"\x28\xb5\x2f\xfd",),
}
_BOMS = {"utf-8": (b"\xef\xbb\xbf",), "utf-16": (b"\xff\xfe", b"\xfe\xff")}


def unpacked_name(name: str) -> str:
    """Returns the name of a file without the suffix of a compression, in lower case."""
    name = name.lower()
    return next((name.removesuffix(end) for end in PACKED if name.endswith(end)), name)


def without_mark(start: bytes) -> bytes:
    """Returns the beginning of a file without UTF-8's mark and leading white space."""
    return start.removeprefix(codecs.BOM_UTF8).lstrip()


def compression_of(path: Path) -> str:
    """Returns the compression of a file by its first bytes; "none" for other files."""
    with open(path, "rb") as file:
        start = file.read(16)
    return next((name for name, magic in _MAGIC.items() if start.startswith(magic)), "none")


def open_bytes(path: Path, compression: str | None = None) -> BinaryIO:
    """Opens a file, unpacked.

    Args:
        compression: one of `text_format.COMPRESSIONS`; None is that of its content.

    Raises:
        ValueError: its content has another compression.
    """
    actual = compression_of(path)
    if compression not in (None, actual) and path.stat().st_size:
        raise ValueError(
            f"{path}: expected the compression {compression} (compression in the format), got "
            f"{actual}"
        )
    if actual == "gzip":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if actual in ("bz2", "xz"):
        streams = _Streams(path, bz2.BZ2Decompressor if actual == "bz2" else lzma.LZMADecompressor)
        return io.BufferedReader(streams)
    if actual == "zstd":
        import pyarrow as pa

        stream: Any = pa.CompressedInputStream(str(path), "zstd")
        return io.BufferedReader(stream)
    return open(path, "rb")


class _Streams(io.RawIOBase):
    """The content of one or more compressed streams; Python's readers ignore damaged later ones."""

    def __init__(self, path: Path, make: Callable[[], Any]) -> None:
        self._file, self._make = open(path, "rb"), make  # noqa: SIM115
        self._stream, self._packed, self._ready = make(), b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if self._stream.eof:
                self._packed = self._stream.unused_data.lstrip(b"\0") or self._packed
                self._packed = self._packed or self._file.read(_PACKED_BYTES).lstrip(b"\0")
                if not self._packed:
                    return 0
                self._stream = self._make()
            elif not self._packed and self._stream.needs_input:
                self._packed = self._file.read(_PACKED_BYTES)
                if not self._packed:
                    raise EOFError("it ends within a stream")
            self._ready, self._packed = self._stream.decompress(self._packed, len(buffer)), b""
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


class ByteRange(NamedTuple):
    """The lines of a plain text file in UTF-8 that begin in bytes [begin, end).

    Attributes:
        lines: number of lines before them, for messages.
    """

    begin: int
    end: int
    lines: int = 0


def _read_range(path: Path, within: ByteRange, block_bytes: int) -> Iterator[bytes]:
    """Yields the bytes of a range's lines, of which the last block may be an eighth larger."""
    with open(path, "rb") as file:

        def line_start(position: int) -> int:
            file.seek(max(position - 1, 0))
            if position:
                file.readline()
            return file.tell()

        left = line_start(within.end) - line_start(within.begin)
        while data := file.read(left if left < block_bytes + block_bytes // 8 else block_bytes):
            left -= len(data)
            yield data


def count_lines(path: Path, within: ByteRange) -> int:
    """Returns the number of lines of a plain file that begin within a range."""
    lines, last = 0, b"\n"
    for block in _read_range(path, within, _PACKED_BYTES):
        lines, last = lines + block.count(b"\n"), block[-1:]
    return lines + (last != b"\n")


def read_plain(path: Path) -> bytes | None:
    """Returns the content of a file, of whole lines; None if it is compressed or has a mark."""
    content = path.read_bytes()
    if content.startswith(tuple(itertools.chain(*_MAGIC.values(), *_BOMS.values()))):
        return None
    return content if content.endswith(b"\n") or not content else content + b"\n"


def has_lone_returns(block: bytes) -> bool:
    """Returns whether a return of a block does not stand before a line feed."""
    return b"\r" in block and block.count(b"\r") != block.count(b"\r\n")


def is_utf_8(block: bytes) -> bool:
    """Returns whether a block is UTF-8."""
    try:
        return block.isascii() or block.decode() is not None
    except UnicodeDecodeError:
        return False


def not_utf_8(line: str) -> str | None:
    """Returns the position of a byte that is not UTF-8, or None; a surrogate stands for it."""
    try:
        line.isascii() or line.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start + 1}: not UTF-8 (byte {ord(line[error.start]) - 0xDC00:#x})"
    return None


def read_blocks(
    path: Path,
    block_bytes: int,
    text: TextFormat,
    within: ByteRange | None = None,
    line: Callable[[], int] = lambda: 0,
) -> Iterator[bytes]:
    """Yields a text file in UTF-8, in blocks of whole lines.

    Args:
        block_bytes: approximate size of a block, which has at least one line.
        text: its encoding and compression. Without an encoding it is UTF-8, with or without a mark
            at its beginning, of which other bytes stay as they are.
        within: the lines to read; None is all.
        line: returns the number of lines of the file that have been read, for messages.

    Raises:
        ValueError: a line is longer than `LONGEST_LINE`, the file is not in the encoding, or its
            archive is damaged; the message has the file, and the line if it is known.
    """
    rest = b""
    try:
        for block in _decoded(path, block_bytes, text, within, line):
            if end := block.rfind(b"\n") + 1:  # copied once, if at all
                whole = b"".join((rest, memoryview(block)[:end])) if rest else block[:end]
                rest = block[end:]
            else:
                rest += block
                # Lines end in a return if none has a line feed.
                end = rest.rfind(b"\n") + 1 or rest.rfind(b"\r", 0, len(rest) - 1) + 1
                whole, rest = rest[:end], rest[end:]
            if whole:
                yield whole
            if len(rest) > LONGEST_LINE:
                raise too_long(path, line() + 1)
    except BROKEN as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(
            f"{path}, after line {line()}: not a whole {compression_of(path)} file ({error})"
        ) from error
    if rest:
        yield rest


def other_encoding(text: TextFormat) -> str | None:
    """Returns the encoding of a text, or None for UTF-8, of which bad bytes have their lines."""
    name = "utf-8" if text.encoding is None else codecs.lookup(text.encoding).name
    return None if name in ("utf-8", "utf-8-sig") else text.encoding


def too_long(path: Path, line: int) -> ValueError:
    """Returns the error for a line that is too long."""
    return ValueError(f"{path}, line {line}: longer than {LONGEST_LINE} characters")


def _decoded(
    path: Path,
    block_bytes: int,
    text: TextFormat,
    within: ByteRange | None,
    line: Callable[[], int],
) -> Iterator[bytes]:
    """Yields the bytes of a file in UTF-8, without a mark."""
    if within is not None:
        blocks = _read_range(path, within, block_bytes)
        if not within.begin:
            blocks = itertools.chain((_without_mark(path, next(blocks, b""), None),), blocks)
        yield from blocks
        return
    encoding = other_encoding(text)
    with open_bytes(path, text.compression) as file:
        data = _without_mark(path, file.read(block_bytes), encoding)
        if encoding is None:
            yield data
            while data := file.read(block_bytes):
                yield data
            return
        decode, mark = codecs.getincrementaldecoder(encoding)().decode, "\ufeff"
        while data:
            try:
                following = file.read(block_bytes)
                part = decode(data, final=not following)
            except UnicodeError as error:
                raise ValueError(
                    f"{path}, after line {line()}: expected the encoding {encoding} (--encoding), "
                    f"got other bytes ({error})"
                ) from None
            yield part.removeprefix(mark).encode()
            data, mark = following, ""


def _without_mark(path: Path, data: bytes, encoding: str | None) -> bytes:
    """Returns the beginning of a file in UTF-8 without its mark.

    Raises:
        ValueError: it has the mark of another encoding.
    """
    if encoding is None and data.startswith(codecs.BOM_UTF8):
        return data.removeprefix(codecs.BOM_UTF8)
    used = (encoding or "utf-8").lower().replace("_", "-")
    for name, marks in _BOMS.items():
        same = name, name.replace("-", ""), "utf-32"
        if data.startswith(marks) and not used.startswith(same):
            raise ValueError(
                f"{path}: expected {encoding or 'UTF-8'}, got the mark of {name.upper()}; try "
                f"--encoding {name}"
            )
    return data
