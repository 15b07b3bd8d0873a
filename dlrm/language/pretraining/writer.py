"""Writes datasets of pre-training rows from raw text; the module `rows` makes the rows.

Texts are tokenized once, into files that all processes map. Each repetition cuts these into pairs
of segments; all pairs are put into a random order, and each shard is filled from its part of it.
Parallel tasks have their own random numbers, so that any number of processes writes the same bytes.
"""

import shutil
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dlrm.data.workers import InOrder, workers
from dlrm.files import atomic_directory
from dlrm.language.data.config import PretrainingTextConfig
from dlrm.language.data.wordpiece import Tokenizer, load_tokenizer
from dlrm.language.pretraining.hdf5 import KIND, LABEL, LENGTH, NUM_MASKED, TextRows, write_hdf5
from dlrm.language.pretraining.raw_text import Sentences, read_sentences, text_files
from dlrm.language.pretraining.rows import Documents, make_rows, segment_pairs
from dlrm.manifest import checksum, write_manifest
from dlrm.mapped_files import map_file

_WORK = "work"
_TASK_TOKENS = 1 << 18  # of the documents that a task cuts
_TASK_ROWS = 1 << 13  # that are filled at once
_SHARD_ROWS = 1 << 18

OnProgress = Callable[[str, int, int], None]


class TextSummary(NamedTuple):
    """Counts of the data read and written.

    Attributes:
        files: files read.
        documents: documents in them.
        sentences: sentences in them.
        tokens: tokens in them.
        rows: rows written.
        masked_tokens: masked tokens in them.
        random_share: share of rows in which B is from another document.
        padding_share: share of padding among their tokens.
        shards: files written.
    """

    files: int
    documents: int
    sentences: int
    tokens: int
    rows: int
    masked_tokens: int
    random_share: float
    padding_share: float
    shards: int


def write_dataset(
    config: PretrainingTextConfig,
    source: str | Path | list[str | Path],
    output: str | Path,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> TextSummary:
    """Writes a dataset of pre-training rows, which appears when it is complete.

    Args:
        source: a text file, a directory of files, or several of these.
        output: the directory; an earlier dataset there is replaced.
        on_progress: called with a stage, the amount done and the total: "tokenize" and bytes, "cut"
            and documents, or "write" and rows.

    Raises:
        FileNotFoundError: a file is missing.
        FileExistsError: `output` exists and may not be replaced.
        ValueError: a file is not UTF-8, is truncated or has other lengths; the vocabulary lacks a
            special token; there are fewer than two documents, or fewer rows than shards.
        ChildProcessError: a process was killed.
    """
    given = source if isinstance(source, list) else [source]
    files = text_files([Path(path) for path in given])
    tokenizer = load_tokenizer(config.vocab_file, config.lower_case)
    task = _Task(config, checksum(config.vocab_file), Path())
    with atomic_directory(output, replace=True) as staging, workers(config.processes) as in_order:
        task = task._replace(work=staging / _WORK)
        task.work.mkdir()
        documents = _tokenize(task, files, in_order, on_progress)
        pairs = _cut(task, documents, in_order, on_progress)
        written = _write(task, pairs, in_order, on_progress)
        summary = TextSummary(
            len(files),
            len(documents.documents) - 1,
            len(documents.sentences) - 1,
            len(documents.tokens),
            *_totals(config, written),
        )
        shutil.rmtree(task.work)
        _finish(config, staging, tokenizer, task.vocab_crc, written, summary)
    return summary


class _Task(NamedTuple):
    """State that every task shares."""

    config: PretrainingTextConfig
    vocab_crc: str
    work: Path

    @property
    def tokenizer(self) -> Tokenizer:
        return _tokenizer(self.config.vocab_file, self.config.lower_case, self.vocab_crc)

    def open(self, name: str, dtype: str) -> np.ndarray:
        return map_file(self.work / name, dtype)

    def documents(self) -> Documents:
        tokens = self.open("tokens", _dtype(self.tokenizer))
        return Documents(tokens, self.open("sentences", "<i8"), self.open("documents", "<i8"))


@lru_cache(maxsize=1)
def _tokenizer(vocab_file: str, lower_case: bool, crc: str) -> Tokenizer:
    """Returns the tokenizer, read once per process; `crc` detects another file of the same name."""
    return load_tokenizer(vocab_file, lower_case)


def _dtype(tokenizer: Tokenizer) -> str:
    """Returns the dtype in which tokens wait to be cut."""
    return "<u2" if tokenizer.vocab_size <= 1 << 16 else "<i4"


class _Block(NamedTuple):
    task: _Task
    sentences: Sentences


def _encode(block: _Block) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Returns tokens, their number and document for each sentence with any, and the bytes read."""
    tokenizer, sentences = block.task.tokenizer, block.sentences
    encoded = tokenizer.encode(sentences.texts)
    kept = encoded.lengths > 0
    numbers = np.array(sentences.documents, np.int64)[kept]
    tokens = encoded.ids.astype(_dtype(tokenizer))
    return tokens, encoded.lengths[kept], numbers, sentences.bytes_read


def _tokenize(
    task: _Task, files: list[Path], in_order: InOrder, on_progress: OnProgress
) -> Documents:
    """Writes the tokens of all files, and the starts of sentences and documents."""
    total = sum(file.stat().st_size for file in files)
    blocks = (_Block(task, block) for block in read_sentences(files, task.config.input_format))
    num_tokens = num_sentences = 0
    last_document = -1
    with (
        open(task.work / "tokens", "wb") as tokens_file,
        open(task.work / "sentences", "wb") as sentences_file,
        open(task.work / "documents", "wb") as documents_file,
    ):
        for tokens, lengths, numbers, bytes_read in in_order(_encode, blocks):
            tokens_file.write(tokens.data)
            starts = num_tokens + np.cumsum(lengths) - lengths
            sentences_file.write(starts.astype("<i8").data)
            begins = np.flatnonzero(np.diff(numbers, prepend=last_document))
            documents_file.write((num_sentences + begins).astype("<i8").data)
            num_tokens, num_sentences = num_tokens + len(tokens), num_sentences + len(lengths)
            last_document = int(numbers[-1]) if len(numbers) else last_document
            on_progress("tokenize", bytes_read, total)
        sentences_file.write(np.array([num_tokens], "<i8").data)
        documents_file.write(np.array([num_sentences], "<i8").data)
    names = ", ".join(map(str, files[:3])) + (" ..." if len(files) > 3 else "")
    if not num_tokens:
        raise ValueError(f"{names}: expected sentences, found none")
    documents = task.documents()
    if len(documents.documents) == 2:
        hint = {"sentences": "blank lines", "wikitext": "headings like ` = Title = `"}
        raise ValueError(
            f"{names}: expected two documents or more, since a sentence that does not follow comes "
            f"from another one; got one ({hint[task.config.input_format]} are between documents)"
        )
    return documents


class _Range(NamedTuple):
    task: _Task
    repetition: int
    first: int
    last: int


def _cut(
    task: _Task, documents: Documents, in_order: InOrder, on_progress: OnProgress
) -> np.ndarray:
    """Returns the pairs of all repetitions in their final order."""
    starts = documents.sentences[documents.documents]  # first token of each document
    count = len(starts) - 1
    edges = np.searchsorted(starts, np.arange(0, starts[-1], _TASK_TOKENS)).tolist()
    edges = sorted({*edges, count})
    repetitions = range(task.config.dupe_factor)
    ranges = (
        _Range(task, repetition, first, last)
        for repetition in repetitions
        for first, last in zip(edges[:-1], edges[1:], strict=True)
    )
    done, total = 0, count * len(repetitions)
    sizes = np.diff(edges).tolist() * len(repetitions)
    with open(task.work / "unordered", "wb") as file:
        for pairs, size in zip(in_order(_cut_range, ranges), sizes, strict=True):
            file.write(pairs.data)
            done += size
            on_progress("cut", done, total)
    unordered = map_file(task.work / "unordered", "<i8").reshape(-1, 5)
    keys = np.random.SFC64([task.config.seed, 1]).random_raw(len(unordered))
    with open(task.work / "pairs", "wb") as file:
        order = np.argsort(keys, kind="stable")
        for start in range(0, len(order), _SHARD_ROWS):
            file.write(unordered[order[start : start + _SHARD_ROWS]].data)
    return task.open("pairs", "<i8").reshape(-1, 5)


def _cut_range(part: _Range) -> np.ndarray:
    documents = part.task.documents()
    return segment_pairs(documents, part.first, part.last, part.repetition, part.task.config)


def _shard_bounds(rows: int, num_shards: int | None) -> list[tuple[int, int]]:
    shards = num_shards or -(-rows // _SHARD_ROWS)
    if rows < shards:
        raise ValueError(f"--num_shards: expected at most one a row, {rows}, got {shards}")
    edges = [rows * shard // shards for shard in range(shards + 1)]
    return list(zip(edges[:-1], edges[1:], strict=True))


class _Shard(NamedTuple):
    task: _Task
    number: int
    first: int
    last: int


class _Written(NamedTuple):
    """A shard that was written."""

    rows: int
    tokens: int
    masked_tokens: int
    random_rows: int


def _write(
    task: _Task, pairs: np.ndarray, in_order: InOrder, on_progress: OnProgress
) -> list[_Written]:
    """Fills the rows of all shards."""
    bounds = _shard_bounds(len(pairs), task.config.num_shards)
    shards = (_Shard(task, number, *bound) for number, bound in enumerate(bounds))
    written = []
    for (_, end), shard in zip(bounds, in_order(_write_shard, shards), strict=True):
        written.append(shard)
        on_progress("write", end, len(pairs))
    return written


def _write_shard(shard: _Shard) -> _Written:
    task, documents = shard.task, shard.task.documents()
    pairs = task.open("pairs", "<i8").reshape(-1, 5)
    counts = np.zeros(5, np.int64)

    def filled() -> Iterator[TextRows]:
        for first in range(shard.first, shard.last, _TASK_ROWS):
            part = pairs[first : min(first + _TASK_ROWS, shard.last)]
            rows = make_rows(documents.tokens, part, task.tokenizer, task.config, first)
            counts[:] += [len(rows.facts), *rows.facts.sum(axis=0, dtype=np.int64)]
            yield rows

    write_hdf5(task.work.parent / f"part_{shard.number:05}.hdf5", filled())
    return _Written(*counts[[0, 1 + LENGTH, 1 + NUM_MASKED, 1 + LABEL]].tolist())


def _totals(
    config: PretrainingTextConfig, written: list[_Written]
) -> tuple[int, int, float, float, int]:
    """Returns the last fields of `TextSummary`."""
    rows, tokens, masked, random = map(sum, zip(*written, strict=True))
    padding = 1 - tokens / (rows * config.max_seq_length)
    return rows, masked, random / rows, padding, len(written)


def _finish(
    config: PretrainingTextConfig,
    directory: Path,
    tokenizer: Tokenizer,
    vocab_crc: str,
    written: list[_Written],
    summary: TextSummary,
) -> None:
    """Writes the manifest."""
    names = ("input_format", "seed", "dupe_factor", "masked_lm_prob", "short_seq_prob")
    write_manifest(
        directory,
        KIND,
        rows=[shard.rows for shard in written],
        max_seq_length=config.max_seq_length,
        max_predictions=config.max_predictions_per_seq,
        vocab_size=tokenizer.vocab_size,
        vocabulary={"crc32": vocab_crc, "lower_case": config.lower_case},
        made_with={name: getattr(config, name) for name in names},
        documents=summary.documents,
        tokens=summary.tokens,
        masked_tokens=summary.masked_tokens,
    )
