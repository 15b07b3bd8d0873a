"""Splits text files into sentences, with their documents.

"sentences": one sentence per line, and a blank line between documents.
"wikitext": as in WikiText, one paragraph per line. A heading of the first level (` = Title = `)
begins a document and other headings are left out; a paragraph is split after ` . `, ` ! ` and ` ?
`, and ` @-@ `, ` @,@ ` and ` @.@ ` become the characters that they stand for.

A document ends with its file.
"""

import gzip
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

LONGEST_LINE = 1 << 22  # bytes; tokenizing one takes 170 times as much memory
_GZIP_MAGIC = b"\x1f\x8b"
_SENTENCE_END = re.compile(r"(?<= [.!?]) ")
_ESCAPED = re.compile(r" @([-,.])@ ")


class Sentences(NamedTuple):
    """Some consecutive sentences.

    Attributes:
        documents: number of each sentence's document, ascending.
        bytes_read: bytes of the files read so far.
    """

    texts: list[str]
    documents: list[int]
    bytes_read: int


def text_files(paths: list[Path]) -> list[Path]:
    """Returns files, and those in directories and below, without hidden ones, by name.

    Raises:
        FileNotFoundError: a path does not exist, or a folder has no files.
        ValueError: a path is neither a folder nor a regular file.
    """
    every = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file or directory")
        if not path.is_dir():
            if not path.is_file():  # opening a pipe would wait
                raise ValueError(f"{path}: expected a regular file or a folder")
            every.append(path)
            continue
        inside = (file for file in path.rglob("*") if file.is_file())
        visible = (
            file for file in inside if not any(p[0] == "." for p in file.relative_to(path).parts)
        )
        if not (files := sorted(visible)):
            raise FileNotFoundError(f"{path}: expected text files, found none")
        every += files
    return every


def read_sentences(
    files: list[Path], text_format: str = "sentences", block_bytes: int = 1 << 20
) -> Iterator[Sentences]:
    """Yields the sentences of files, plain or gzip, in blocks of about the given bytes.

    Raises:
        ValueError: a file is truncated, is not UTF-8 or has a line of 4 MiB; the message names the
            line.
    """
    parse = _PARSERS[text_format]
    texts: list[str] = []
    documents: list[int] = []
    document = size = done = 0
    for path in files:
        document += 1
        with open(path, "rb") as raw:
            for line in _lines(path, raw):
                sentences, begins = parse(line)
                document += begins
                texts += sentences
                documents += [document] * len(sentences)
                size += len(line)
                if size >= block_bytes:
                    yield Sentences(texts, documents, done + raw.tell())
                    texts, documents, size = [], [], 0
            done += raw.tell()
    yield Sentences(texts, documents, done)


def _lines(path: Path, raw: IO[bytes]) -> Iterator[str]:
    compressed = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    raw.seek(0)
    number = 0
    try:
        file = gzip.GzipFile(fileobj=raw) if compressed else raw
        while line := file.readline(LONGEST_LINE):
            number += 1
            if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                raise ValueError(f"{path}: line {number}: longer than {LONGEST_LINE} bytes")
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: line {number}: not UTF-8: {error.reason}") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: after line {number}: not a whole gzip file: {error}") from error


def _sentence_a_line(line: str) -> tuple[list[str], bool]:
    """Returns the sentences of a line, and whether a document begins with it."""
    text = line.strip()
    return ([text], False) if text else ([], True)


def _wikitext(line: str) -> tuple[list[str], bool]:
    text = line.strip()
    if text.startswith("= ") and text.endswith(" ="):
        return [], not text.startswith("= = ")
    text = _ESCAPED.sub(r"\1", text)
    return [sentence for sentence in _SENTENCE_END.split(text) if sentence], False


_PARSERS: dict[str, Callable[[str], tuple[list[str], bool]]] = {
    "sentences": _sentence_a_line,
    "wikitext": _wikitext,
}
