"""Writes datasets of pre-training rows from raw text; the module `rows` makes the rows.

Texts are tokenized once. Each repetition cuts them into pairs of segments; all pairs are put into a
random order, and processes fill each shard from its part of it. Random numbers are keyed by
document and row, so that any number of processes writes the same bytes.

Text is one sentence per line, with a blank line between documents, or as in WikiText ("wikitext"),
one paragraph per line. There a heading of the first level (` = Title = `) begins a document and
other headings are left out; a paragraph is split after ` . `, ` ! ` and ` ? `, and ` @-@ `, ` @,@ `
and ` @.@ ` become the characters that they stand for. A document ends with its file.
"""

import re
import shutil
from array import array
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, count, islice, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from dlrm.data.sources.text_files import BROKEN, compression_of, open_bytes
from dlrm.data.workers import workers
from dlrm.files import atomic_directory
from dlrm.language.config import PretrainingTextConfig
from dlrm.language.rows import FIELDS, KIND, Documents, h5py, make_rows, segment_pairs
from dlrm.language.wordpiece import Tokenizer, Tokens
from dlrm.manifest import checksum, write_manifest
from dlrm.mapped_files import map_file

LONGEST_LINE = 1 << 22  # bytes; tokenizing one takes 170 times as much memory
_SENTENCE_END = re.compile(r"(?<= [.!?]) ")
_ESCAPED = re.compile(r" @([-,.])@ ")
_BLOCK_SENTENCES = 1 << 13  # that are tokenized at once
_BLOCK_ROWS = 1 << 13  # that are filled at once
SHARD_TOKENS = 1 << 25  # in a file, with padding


class TextSummary(NamedTuple):
    """Counts of the data read and written.

    Attributes:
        row_tokens: tokens in all rows, without padding.
        random_rows: rows in which B is from another document.
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


def write_dataset(
    config: PretrainingTextConfig, source: Iterable[str | Path], output: str | Path
) -> TextSummary:
    """Writes a dataset of pre-training rows, which appears when it is complete.

    Args:
        source: text files, and directories of files.
        output: the directory; an earlier dataset there is replaced.

    Raises:
        FileNotFoundError: a file is missing.
        FileExistsError: `output` exists and may not be replaced.
        ValueError: a file is not UTF-8 or is truncated; the vocabulary lacks a special token; there
            are fewer than two documents.
        ChildProcessError: a process was killed.
    """
    files = text_files(map(Path, source))
    tokenizer = Tokenizer(config.vocab_file, config.lower_case)
    with atomic_directory(output, replace=True) as staging, workers(config.processes) as in_order:
        (work := staging / "work").mkdir()
        documents = _tokenized(config, tokenizer, files, work / "tokens")
        pairs = _all_pairs(config, documents)
        shards = -(-len(pairs) * config.max_seq_length // SHARD_TOKENS)
        edges = [len(pairs) * shard // shards for shard in range(shards + 1)]
        parts = (
            (number, first, pairs[first:last])
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
        vocabulary = {"crc32": checksum(config.vocab_file), "lower_case": config.lower_case}
        write_manifest(
            staging,
            KIND,
            rows=totals[:, 0].tolist(),
            max_seq_length=config.max_seq_length,
            max_predictions=config.max_predictions_per_seq,
            vocab_size=tokenizer.vocab_size,
            vocabulary=vocabulary,
            made_with={n: getattr(config, n) for n in ("input_format", "seed", "dupe_factor")},
            **{n: getattr(summary, n) for n in ("documents", "tokens", "masked_tokens")},
        )
    return summary


def text_files(paths: Iterable[Path]) -> list[Path]:
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
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        shown = (f for f in inside if not any(p[0] == "." for p in f.relative_to(path).parts))
        files = [file for file in shown if file.is_file()]
        if not files:
            raise FileNotFoundError(f"{path}: expected text files, found none")
        every += files
    return every


def read_sentences(path: Path, text_format: str = "sentences") -> Iterator[str | None]:
    """Yields the sentences of a file, plain or compressed; None begins a document.

    Raises:
        ValueError: the file is truncated, is not UTF-8 or has a line of 4 MiB; the message names
            the line.
    """
    number = 0
    yield None
    try:
        with open_bytes(path) as file:
            while line := file.readline(LONGEST_LINE):
                number += 1
                if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                    raise ValueError(f"{path}: line {number}: longer than {LONGEST_LINE} bytes")
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if text_format == "wikitext":
                    yield from _wikitext(text)
                else:
                    yield text or None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: line {number}: not UTF-8: {error.reason}") from error
    except BROKEN as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        kind = compression_of(path)
        raise ValueError(
            f"{path}: after line {number}: not a whole {kind} file: {error}"
        ) from error


def _wikitext(text: str) -> Iterator[str | None]:
    if text.startswith("= ") and text.endswith(" ="):
        if not text.startswith("= = "):
            yield None
        return
    yield from filter(None, _SENTENCE_END.split(_ESCAPED.sub(r"\1", text)))


def _tokenized(
    config: PretrainingTextConfig, tokenizer: Tokenizer, files: list[Path], path: Path
) -> Documents:
    """Returns the documents of all files, whose tokens are in a new file."""
    numbers, counter, lengths = array("q"), count(1), []

    def sentences() -> Iterator[str]:
        for file in tqdm(files, "tokenize", unit="files", disable=None):
            for sentence in read_sentences(file, config.input_format):
                if sentence is None:
                    number = next(counter)
                else:
                    numbers.append(number)
                    yield sentence

    remaining = sentences()
    with open(path, "wb") as out:
        while block := list(islice(remaining, _BLOCK_SENTENCES)):
            encoded = tokenizer.encode(block)
            out.write(encoded.ids.astype(_dtype(tokenizer)).data)
            lengths.append(encoded.lengths)
    of_sentences = np.concatenate([np.empty(0, np.int64), *lengths])
    kept = of_sentences > 0
    begins = np.flatnonzero(np.diff(np.array(numbers)[kept], prepend=0))
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
    starts, first = array("q", [0, *ends]), array("q", [*begins, len(ends)])
    return Documents(map_file(path, _dtype(tokenizer)), starts, first)


def _all_pairs(config: PretrainingTextConfig, documents: Documents) -> np.ndarray:
    """Returns the pairs of all repetitions, in a random order; see `segment_pairs`."""
    count = len(documents.documents) - 1
    every = product(range(config.dupe_factor), range(count))
    total = config.dupe_factor * count
    found = (
        segment_pairs(documents, number, repetition, config)
        for repetition, number in tqdm(every, "cut", total, unit="documents", disable=None)
    )
    pairs = np.fromiter(chain.from_iterable(found), np.dtype(("i8", 5)))
    keys = np.random.SFC64([config.seed, 1]).random_raw(len(pairs))
    return pairs[np.argsort(keys, kind="stable")]


def _dtype(tokenizer: Tokenizer) -> str:
    """Returns the dtype in which tokens wait to be cut."""
    return "<u2" if tokenizer.vocab_size <= 1 << 16 else "<i4"


def _write_shard(
    config: PretrainingTextConfig,
    tokenizer: Tokenizer,
    work: Path,
    shard: tuple[int, int, np.ndarray],
) -> np.ndarray:
    """Writes a file of rows; returns their number, and that of their tokens of each kind."""
    number, first, pairs = shard
    tokens, blocks = map_file(work / "tokens", _dtype(tokenizer)), []
    for start in range(0, len(pairs), _BLOCK_ROWS):
        a0, a1, b0, b1, is_random = pairs[start : start + _BLOCK_ROWS].T
        segments = Tokens(tokens, a0, a1 - a0), Tokens(tokens, b0, b1 - b0)
        rows = (*make_rows(*segments, tokenizer, config, first + start), is_random)
        blocks.append([a.astype(kind) for a, kind in zip(rows, FIELDS.values(), strict=True)])
    fields = [np.concatenate(parts) for parts in zip(*blocks, strict=True)]
    with h5py().File(work.parent / f"part_{number:05}.hdf5", "w") as file:
        for name, values in zip(FIELDS, fields, strict=True):
            file.create_dataset(name, data=values, compression="gzip")
    _, mask, _, positions, _, labels = fields
    return np.array([len(labels), mask.sum(), np.count_nonzero(positions), labels.sum()])
