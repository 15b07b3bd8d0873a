"""Text files of any encoding, plain or compressed, as bytes and as lines."""

import bz2
import codecs
import gzip
import io
import itertools
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

PACKED = (".gz", ".bz2", ".xz", ".zst")
BROKEN = (EOFError, OSError, zlib.error, lzma.LZMAError)  # what a damaged archive raises
_PACKED_BYTES = 1 << 18
LONGEST_LINE = 1 << 24  # bytes, or characters
_MAGIC = {
    "gzip": (b"\x1f\x8b",),
    "bz2": tuple(b"BZh%d1AY&SY" % level for level in range(1, 10)),
    "xz": (b"\xfd7zXZ\0",),
    "zstd": (b"\x28\xb5\x2f\xfd",),
}
UTF_8_BOM, _UTF_16_BOMS = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")


def unpacked_name(name: str) -> str:
    """Returns the name of a file without the suffix of a compression, in lower case."""
    name = name.lower()
    return next((name.removesuffix(end) for end in PACKED if name.endswith(end)), name)


def without_mark(start: bytes) -> bytes:
    """Returns the beginning of a file without UTF-8's mark and leading white space."""
    return start.removeprefix(UTF_8_BOM).lstrip()


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
        """Returns True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Reads some bytes; 0 at the end.

        Raises:
            EOFError, OSError, lzma.LZMAError: a stream is damaged, or not whole.
        """
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
        """Closes the file."""
        self._file.close()
        super().close()


def open_text(
    path: Path, encoding: str | None = None, compression: str | None = None
) -> io.TextIOBase:
    """Opens a text file, plain or compressed; bytes that are not UTF-8 become surrogates.

    Args:
        encoding: its encoding; None is UTF-8, with or without a mark at its beginning.
        compression: see `open_bytes`.
    """
    encoding = other_encoding(encoding)
    errors = "surrogateescape" if encoding is None else "strict"
    options: Any = {"encoding": encoding or "utf-8-sig", "errors": errors, "newline": ""}
    return io.TextIOWrapper(open_bytes(path, compression), **options)


class ByteRange(NamedTuple):
    """The lines of a plain text file in UTF-8 that begin in bytes [begin, end).

    Attributes:
        lines: number of lines before them, for messages.
    """

    begin: int
    end: int
    lines: int = 0


class _RangeReader:
    """Reads the bytes of a range, as a file."""

    def __init__(self, path: Path, within: ByteRange) -> None:
        self._file = open(path, "rb")  # noqa: SIM115
        self._left = self._line_start(within.end)
        self._left -= self._line_start(within.begin)

    def _line_start(self, place: int) -> int:
        """Moves to the first line that begins at a place or later; returns its place."""
        self._file.seek(max(place - 1, 0))
        if place:
            self._file.readline()
        return self._file.tell()

    def read(self, size: int) -> bytes:
        data = self._file.read(min(size, self._left))
        self._left -= len(data)
        return data

    def __enter__(self) -> "_RangeReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def count_lines(path: Path, within: ByteRange) -> int:
    """Returns the number of lines of a plain file that begin within a range."""
    lines, last = 0, b"\n"
    with _RangeReader(path, within) as file:
        while block := file.read(_PACKED_BYTES):
            lines, last = lines + block.count(b"\n"), block[-1:]
    return lines + (last != b"\n")


def read_plain(paths: Sequence[Path]) -> list[bytes] | None:
    """Returns the content of small files, of whole lines; None if one is compressed or marked."""
    special = (*itertools.chain(*_MAGIC.values()), UTF_8_BOM, *_UTF_16_BOMS)
    contents = [path.read_bytes() for path in paths]
    if any(content.startswith(special) for content in contents):
        return None
    return [c if c.endswith(b"\n") or not c else c + b"\n" for c in contents]


def is_plain(block: bytes) -> bool:
    """Returns whether a block is UTF-8, without NUL, and with returns only before line feeds."""
    if b"\0" in block or (b"\r" in block and block.count(b"\r") != block.count(b"\r\n")):
        return False
    if not block.isascii():
        try:
            block.decode()
        except UnicodeDecodeError:
            return False
    return True


def read_blocks(
    path: Path,
    block_bytes: int,
    encoding: str | None = None,
    compression: str | None = None,
    within: ByteRange | None = None,
) -> Iterator[bytes]:
    """Yields a text file in UTF-8, in blocks of whole lines.

    Args:
        block_bytes: approximate size of a block, which has at least one line.
        encoding, compression: see `open_text`; bytes that are not UTF-8 stay as they are.
        within: the lines to read; None is all.

    Raises:
        ValueError: a line is longer than `LONGEST_LINE`, the file is not in the encoding, or its
            archive is damaged; the message has the file, and the line if it is known.
    """
    rest, lines, begins = b"", 0 if within is None else within.lines, not (within and within.begin)
    opened: Any = open_bytes(path, compression) if within is None else _RangeReader(path, within)
    with opened as file, archive_named(path, lambda: lines):
        other = other_encoding(encoding)
        line = lambda: lines + rest.count(b"\n")  # noqa: E731
        decoded = _decoded(path, file, block_bytes, other, line, begins)
        for block in decoded:
            if end := block.rfind(b"\n") + 1:  # copied once
                whole, rest = b"".join((rest, memoryview(block)[:end])), block[end:]
            else:
                rest += block
                end = _end_of_lines(rest)
                whole, rest = rest[:end], rest[end:]
            if whole:
                yield whole
                lines += whole.count(b"\n")
            if len(rest) > LONGEST_LINE:
                raise too_long(path, lines + 1)
        if rest:
            yield rest


@contextmanager
def archive_named(path: Path, line: Any) -> Iterator[None]:
    """Raises errors of a damaged archive as ValueError with its name and the lines before."""
    try:
        yield
    except BROKEN as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        kind = compression_of(path)
        raise ValueError(
            f"{path}, after line {line()}: not a whole {kind} file ({error})"
        ) from error


def other_encoding(encoding: str | None) -> str | None:
    """Returns an encoding, or None for UTF-8, of which bad bytes have their lines."""
    utf_8 = encoding is None or codecs.lookup(encoding).name in ("utf-8", "utf-8-sig")
    return None if utf_8 else encoding


def wrong_encoding(path: Path, line: int, encoding: str | None, error: UnicodeError) -> ValueError:
    """Returns the error for a file that is not in its encoding."""
    return ValueError(
        f"{path}, after line {line}: expected the encoding {encoding} (--encoding), got other "
        f"bytes ({error})"
    )


def too_long(path: Path, line: int) -> ValueError:
    """Returns the error for a line that is too long."""
    return ValueError(f"{path}, line {line}: longer than {LONGEST_LINE} characters")


def _decoded(
    path: Path, file: Any, block_bytes: int, encoding: str | None, line: Any, begins: bool
) -> Iterator[bytes]:
    decoder = None if encoding is None else codecs.getincrementaldecoder(encoding)()
    first = True
    while (data := file.read(block_bytes)) or (decoder is not None and not first):
        last = not data
        data = _without_mark(path, data, encoding) if first and begins else data
        if decoder is not None:
            try:
                text = decoder.decode(data, final=last)
            except UnicodeError as error:
                raise wrong_encoding(path, line(), encoding, error) from None
            data = (text.removeprefix("\ufeff") if first else text).encode()
        yield data
        first = False
        if last:
            return


def _without_mark(path: Path, data: bytes, encoding: str | None) -> bytes:
    """Returns the beginning of a file in UTF-8 without its mark.

    Raises:
        ValueError: it has the mark of another encoding.
    """
    if data.startswith(UTF_8_BOM) and encoding is None:
        return data.removeprefix(UTF_8_BOM)
    marks = {"utf-8": (UTF_8_BOM,), "utf-16": _UTF_16_BOMS}
    used = (encoding or "utf-8").lower().replace("_", "-")
    for name, starts in marks.items():
        same = name, name.replace("-", ""), "utf-32"
        if data.startswith(starts) and not used.startswith(same):
            raise ValueError(
                f"{path}: expected {encoding or 'UTF-8'}, got the mark of {name.upper()}; try "
                f"--encoding {name}"
            )
    return data


def _end_of_lines(data: bytes) -> int:
    """Returns the end of the last whole line; lines end in a return if none has a line feed."""
    end = data.rfind(b"\n") + 1
    return end or data.rfind(b"\r", 0, len(data) - 1) + 1


def not_utf_8(line: str) -> str | None:
    """Returns the position of a byte that is not UTF-8, in a line from `open_text`, or None."""
    try:
        line.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start + 1}: not UTF-8 (byte {ord(line[error.start]) - 0xDC00:#x})"
    return None
