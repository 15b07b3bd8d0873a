"""Text files of any encoding, plain or compressed, as bytes and as lines."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

PACKED = (".gz", ".bz2", ".xz", ".zst")
BROKEN = (EOFError, OSError, zlib.error, lzma.LZMAError)  # what a damaged archive raises
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


def compression_of(path: Path) -> str:
    """Returns the compression of a file by its first bytes; "none" for other files."""
    with open(path, "rb") as file:
        start = file.read(16)
    return next((name for name, magic in _MAGIC.items() if start.startswith(magic)), "none")


def open_bytes(path: Path, compression: str | None = None) -> BinaryIO:
    """Opens a file, unpacked.

    Args:
        path: the file.
        compression: one of `text_format.COMPRESSIONS`; None is that of its content.

    Raises:
        ValueError: its content has another compression.
    """
    found = compression_of(path)
    if compression not in (None, found) and path.stat().st_size:
        raise ValueError(
            f"{path}: expected the compression {compression} (compression in the format), got "
            f"{found}"
        )
    if found == "gzip":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if found == "bz2":
        return bz2.open(path, "rb")  # type: ignore[return-value]
    if found == "xz":
        return lzma.open(path, "rb")  # type: ignore[return-value]
    if found == "zstd":
        import pyarrow as pa

        stream: Any = pa.CompressedInputStream(str(path), "zstd")
        return io.BufferedReader(stream)
    return open(path, "rb")


def open_text(
    path: Path, encoding: str | None = None, compression: str | None = None
) -> io.TextIOBase:
    """Opens a text file, plain or compressed; bytes that are not UTF-8 become surrogates.

    Args:
        path: the file.
        encoding: its encoding; None is UTF-8, with or without a mark at its beginning.
        compression: see `open_bytes`.
    """
    errors = "surrogateescape" if encoding is None else "strict"
    options: Any = {"encoding": encoding or "utf-8-sig", "errors": errors, "newline": ""}
    return io.TextIOWrapper(open_bytes(path, compression), **options)


def read_blocks(
    path: Path, block_bytes: int, encoding: str | None = None, compression: str | None = None
) -> Iterator[bytes]:
    """Yields a text file in UTF-8, in blocks of whole lines.

    Args:
        path: the file.
        block_bytes: approximate size of a block, which has at least one line.
        encoding, compression: see `open_text`; bytes that are not UTF-8 stay as they are.

    Raises:
        ValueError: a line is longer than `LONGEST_LINE`, the file is not in the encoding, or its
            archive is damaged; the message has the file, and the line if it is known.
    """
    rest, lines = b"", 0
    with open_bytes(path, compression) as file, archive_named(path, lambda: lines):
        decoded = _decoded(path, file, block_bytes, encoding, lambda: lines + rest.count(b"\n"))
        for block in decoded:
            rest += block
            end = _end_of_lines(rest)
            if end:
                yield rest[:end]
                lines += rest.count(b"\n", 0, end)
                rest = rest[end:]
            if len(rest) > LONGEST_LINE:
                raise too_long(path, lines + 1)
        if rest:
            yield rest


@contextmanager
def archive_named(path: Path, line: Any) -> Iterator[None]:
    """Raises errors of a damaged archive within the block as ValueError with its name.

    Args:
        path: the file.
        line: returns the number of lines that were read.
    """
    try:
        yield
    except BROKEN as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        kind = compression_of(path)
        raise ValueError(
            f"{path}, after line {line()}: not a whole {kind} file ({error})"
        ) from error


def too_long(path: Path, line: int) -> ValueError:
    """Returns the error for a line that is too long."""
    return ValueError(f"{path}, line {line}: longer than {LONGEST_LINE} characters")


def _decoded(
    path: Path, file: BinaryIO, block_bytes: int, encoding: str | None, line: Any
) -> Iterator[bytes]:
    if encoding is not None:
        text = io.TextIOWrapper(file, encoding, newline="")
        try:
            yield text.read(block_bytes).removeprefix("\ufeff").encode()
            while block := text.read(block_bytes):
                yield block.encode()
        except UnicodeError as error:
            raise ValueError(
                f"{path}, after line {line()}: expected the encoding {encoding} (--encoding), got "
                f"other bytes ({error})"
            ) from None
        return
    first = True
    while data := file.read(block_bytes):
        if first and data.startswith(_UTF_16_BOMS):
            raise ValueError(
                f"{path}: expected UTF-8, got the mark of UTF-16; try --encoding utf-16"
            )
        yield data.removeprefix(UTF_8_BOM) if first else data
        first = False


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
