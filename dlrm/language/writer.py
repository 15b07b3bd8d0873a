"""Writes datasets of pre-training rows from raw text; the module `rows` makes the rows.

Texts are tokenized once, into a file that all processes map. Each repetition cuts it into pairs of
segments; all pairs are put into a random order, and each shard is filled from its part of it.
Random numbers are keyed by document and row, so that any number of processes writes the same bytes.

Text is one sentence per line, with a blank line between documents, or as in WikiText ("wikitext"),
one paragraph per line. There a heading of the first level (` = Title = `) begins a document and
other headings are left out; a paragraph is split after ` . `, ` ! ` and ` ? `, and ` @-@ `, ` @,@ `
and ` @.@ ` become the characters that they stand for. A document ends with its file.
"""

import gzip
import re
import shutil
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from tqdm import tqdm

from dlrm.data.workers import InOrder, workers
from dlrm.files import atomic_directory
from dlrm.language.config import PretrainingTextConfig
from dlrm.language.rows import (
    KIND,
    LABEL,
    LENGTH,
    NUM_MASKED,
    Documents,
    TextRows,
    make_rows,
    segment_pairs,
    write_hdf5,
)
from dlrm.language.wordpiece import Tokenizer
from dlrm.manifest import checksum, write_manifest
from dlrm.mapped_files import map_file

LONGEST_LINE = 1 << 22  # bytes; tokenizing one takes 170 times as much memory
_GZIP_MAGIC = b"\x1f\x8b"
_SENTENCE_END = re.compile(r"(?<= [.!?]) ")
_ESCAPED = re.compile(r" @([-,.])@ ")
_TASK_TOKENS = 1 << 18  # of the documents that a task cuts
_TASK_ROWS = 1 << 13  # that are filled at once
_SHARD_ROWS = 1 << 18


class TextSummary(NamedTuple):
    """Counts of the data read and written.

    Attributes:
        random_rows: rows in which B is from another document.
        row_tokens: tokens in all rows, without padding.
    """

    files: int
    documents: int
    sentences: int
    tokens: int
    shards: int
    rows: int
    row_tokens: int
    masked_tokens: int
    random_rows: int


class Sentences(NamedTuple):
    """Some consecutive sentences.

    Attributes:
        documents: number of each sentence's document, ascending.
        bytes_read: bytes of the files read so far.
    """

    texts: list[str]
    documents: list[int]
    bytes_read: int


def write_dataset(
    config: PretrainingTextConfig, source: str | Path | list[str | Path], output: str | Path
) -> TextSummary:
    """Writes a dataset of pre-training rows, which appears when it is complete.

    Args:
        source: a text file, a directory of files, or several of these.
        output: the directory; an earlier dataset there is replaced.

    Raises:
        FileNotFoundError: a file is missing.
        FileExistsError: `output` exists and may not be replaced.
        ValueError: a file is not UTF-8, is truncated or has other lengths; the vocabulary lacks a
            special token; there are fewer than two documents, or fewer rows than shards.
        ChildProcessError: a process was killed.
    """
    files = text_files([Path(path) for path in (source if isinstance(source, list) else [source])])
    tokenizer = Tokenizer(config.vocab_file, config.lower_case)
    with atomic_directory(output, replace=True) as staging, workers(config.processes) as in_order:
        work = staging / "work"
        work.mkdir()
        _tokenize(config, tokenizer, files, work)
        documents = _documents(work, tokenizer)
        pairs, order = _cut(config, tokenizer, work, in_order)
        shards = config.num_shards or -(-len(order) // _SHARD_ROWS)
        if len(order) < shards:
            raise ValueError(
                f"--num_shards: expected at most one a row, {len(order)}, got {shards}"
            )
        edges = [len(order) * shard // shards for shard in range(shards + 1)]
        parts = (
            (number, first, pairs[order[first:last]])
            for number, (first, last) in enumerate(zip(edges[:-1], edges[1:], strict=True))
        )
        written = in_order(partial(_write_shard, config, tokenizer, work), parts)
        totals = np.stack([*tqdm(written, "write", shards, unit="files", disable=None)])
        summary = TextSummary(
            len(files),
            len(documents.documents) - 1,
            len(documents.sentences) - 1,
            len(documents.tokens),
            shards,
            *totals.sum(axis=0).tolist(),
        )
        shutil.rmtree(work)
        names = ("input_format", "seed", "dupe_factor", "masked_lm_prob", "short_seq_prob")
        crc = checksum(config.vocab_file)
        write_manifest(
            staging,
            KIND,
            rows=totals[:, 0].tolist(),
            max_seq_length=config.max_seq_length,
            max_predictions=config.max_predictions_per_seq,
            vocab_size=tokenizer.vocab_size,
            vocabulary={"crc32": crc, "lower_case": config.lower_case},
            made_with={name: getattr(config, name) for name in names},
            documents=summary.documents,
            tokens=summary.tokens,
            masked_tokens=summary.masked_tokens,
        )
    return summary


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
        if not path.is_dir() and not path.is_file():  # opening a pipe would wait
            raise ValueError(f"{path}: expected a regular file or a folder")
        inside = path.rglob("[!.]*") if path.is_dir() else [path]
        files = sorted(
            file
            for file in inside
            if file.is_file() and not any(p[0] == "." for p in file.relative_to(path).parts)
        )
        if not files:
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
    parse = _wikitext if text_format == "wikitext" else _sentence_a_line
    texts: list[str] = []
    documents: list[int] = []
    document = size = done = 0
    for path in files:
        document += 1
        with open(path, "rb") as raw:
            for line in _lines(path, raw):
                sentences, begins = parse(line.strip())
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


def _sentence_a_line(text: str) -> tuple[list[str], bool]:
    """Returns the sentences of a line, and whether a document begins with it."""
    return ([text], False) if text else ([], True)


def _wikitext(text: str) -> tuple[list[str], bool]:
    if text.startswith("= ") and text.endswith(" ="):
        return [], not text.startswith("= = ")
    text = _ESCAPED.sub(r"\1", text)
    return [sentence for sentence in _SENTENCE_END.split(text) if sentence], False


def _tokenize(
    config: PretrainingTextConfig, tokenizer: Tokenizer, files: list[Path], work: Path
) -> None:
    """Writes the tokens of all files, and the starts of sentences and documents."""
    lengths, numbers = [], []
    total = sum(file.stat().st_size for file in files)
    bar = tqdm(total=total, desc="tokenize", unit="B", unit_scale=True, disable=None)
    with open(work / "tokens", "wb") as out, bar:
        for texts, documents, bytes_read in read_sentences(files, config.input_format):
            encoded = tokenizer.encode(texts)
            out.write(encoded.ids.astype(_dtype(tokenizer)).data)
            lengths.append(encoded.lengths)
            numbers.append(np.array(documents, np.int64))
            bar.update(bytes_read - bar.n)
    of_sentences = np.concatenate(lengths)
    kept = of_sentences > 0
    begins = np.flatnonzero(np.diff(np.concatenate(numbers)[kept], prepend=-1))
    names = ", ".join(map(str, files[:3])) + (" ..." if len(files) > 3 else "")
    if not len(begins):
        raise ValueError(f"{names}: expected sentences, found none")
    if len(begins) == 1:
        hint = {"sentences": "blank lines", "wikitext": "headings like ` = Title = `"}
        raise ValueError(
            f"{names}: expected two documents or more, since a sentence that does not follow comes "
            f"from another one; got one ({hint[config.input_format]} are between documents)"
        )
    ends = np.cumsum(of_sentences[kept])
    np.append(0, ends).astype("<i8").tofile(work / "sentences")
    np.append(begins, len(ends)).astype("<i8").tofile(work / "documents")


def _dtype(tokenizer: Tokenizer) -> str:
    """Returns the dtype in which tokens wait to be cut."""
    return "<u2" if tokenizer.vocab_size <= 1 << 16 else "<i4"


def _documents(work: Path, tokenizer: Tokenizer) -> Documents:
    kinds = {"tokens": _dtype(tokenizer), "sentences": "<i8", "documents": "<i8"}
    return Documents(*(map_file(work / name, kind) for name, kind in kinds.items()))


def _cut(
    config: PretrainingTextConfig, tokenizer: Tokenizer, work: Path, in_order: InOrder
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the pairs of all repetitions, and their final order."""
    documents = _documents(work, tokenizer)
    starts = documents.sentences[documents.documents]  # first token of each document
    edges = np.searchsorted(starts, np.arange(0, starts[-1], _TASK_TOKENS)).tolist()
    edges = sorted({*edges, len(starts) - 1})
    ranges = [
        (first, last, repetition)
        for repetition in range(config.dupe_factor)
        for first, last in zip(edges[:-1], edges[1:], strict=True)
    ]
    cut = in_order(partial(_cut_range, config, tokenizer, work), ranges)
    with open(work / "pairs", "wb") as file:
        for pairs in tqdm(cut, "cut", len(ranges), unit="parts", disable=None):
            file.write(pairs.data)
    every = map_file(work / "pairs", "<i8").reshape(-1, 5)
    keys = np.random.SFC64([config.seed, 1]).random_raw(len(every))
    return every, np.argsort(keys, kind="stable")


def _cut_range(
    config: PretrainingTextConfig, tokenizer: Tokenizer, work: Path, part: tuple[int, int, int]
) -> np.ndarray:
    return segment_pairs(_documents(work, tokenizer), *part, config)


def _write_shard(
    config: PretrainingTextConfig,
    tokenizer: Tokenizer,
    work: Path,
    shard: tuple[int, int, np.ndarray],
) -> np.ndarray:
    """Writes a file of rows; returns their number, and that of their tokens of each kind."""
    number, first, pairs = shard
    tokens, counts = _documents(work, tokenizer).tokens, np.zeros(5, np.int64)

    def filled() -> Iterator[TextRows]:
        for start in range(0, len(pairs), _TASK_ROWS):
            part = pairs[start : start + _TASK_ROWS]
            rows = make_rows(tokens, part, tokenizer, config, first + start)
            counts[:] += [len(rows.facts), *rows.facts.sum(axis=0, dtype=np.int64)]
            yield rows

    write_hdf5(work.parent / f"part_{number:05}.hdf5", filled())
    return counts[[0, 1 + LENGTH, 1 + NUM_MASKED, 1 + LABEL]]
