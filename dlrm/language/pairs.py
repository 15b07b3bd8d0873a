"""Pairs of sentences with a class, as in the Microsoft Research Paraphrase Corpus (MRPC)."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from dlrm.documents import MAX_JSON_BYTES, brief, read_bytes
from dlrm.language.loader import TextBatch
from dlrm.language.wordpiece import Tokenizer

COLUMNS = ("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String")


class Pairs(NamedTuple):
    """Pairs of sentences of a file, and whether the two of a pair have the same meaning.

    Attributes:
        first: first sentence of each pair.
        second: second sentence of each pair.
        labels: 1 if they have the same meaning, else 0, int64.
    """

    first: list[str]
    second: list[str]
    labels: np.ndarray


def read_pairs(path: str | Path) -> Pairs:
    """Returns the pairs of a tab-separated file with MRPC's columns, without quoting.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not UTF-8, has other columns or no pair, or a line has another
            number of fields or a label other than 0 and 1; the message has file, line and value.
    """
    try:
        text = read_bytes(path, MAX_JSON_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}: line {line}: not UTF-8") from error
    header, *rows = [
        line.removesuffix("\r").split("\t") for line in text.rstrip("\r\n").split("\n")
    ]
    if tuple(header) != COLUMNS:
        got = brief(", ".join(header))
        raise ValueError(f"{path}: line 1: expected the columns {', '.join(COLUMNS)}, got {got}")
    if not rows:
        raise ValueError(f"{path}: expected at least one pair, got none")
    for number, row in enumerate(rows, 2):
        if len(row) != len(COLUMNS):
            raise ValueError(f"{path}: line {number}: expected 5 fields, got {len(row)}")
        if row[0] not in ("0", "1"):
            raise ValueError(f"{path}: line {number}: Quality: expected 0 or 1, got {row[0]!r}")
    labels, _, _, first, second = zip(*rows, strict=True)
    return Pairs(list(first), list(second), np.array(labels).astype(np.int64))


class SentencePairs:
    """Rows of [CLS] first [SEP] second [SEP] with a label: a `TextSource`.

    If a pair has more than `max_seq_length` - 3 tokens, the longer sentence, or else the second,
    loses its last token until the pair fits.

    Args:
        path: the file; see `read_pairs`, whose errors are raised as well.
        max_seq_length: tokens of a row.

    Attributes:
        labels: label of each row, `[num_samples]`, int64.

    Raises:
        ValueError: the length is impossible; the message names flag and value.
    """

    num_masked: np.ndarray | None = None

    def __init__(self, path: str | Path, tokenizer: Tokenizer, max_seq_length: int = 128) -> None:
        room = max_seq_length - 3
        if room < 2:
            raise ValueError(f"--max_seq_length {max_seq_length}: expected 5 or more")
        first, second, self.labels = read_pairs(path)
        self.length, self.num_samples, self._tokenizer = max_seq_length, len(first), tokenizer
        self._first, self._second = tokenizer.encode(first), tokenizer.encode(second)
        one, two = self._first.lengths, self._second.lengths
        kept = np.minimum(one, np.maximum(room - two, -(-room // 2)))
        self._kept_of_first = np.where(one + two > room, kept, one)
        self._kept_of_second = np.minimum(two, room - self._kept_of_first)
        self.lengths = self._kept_of_first + self._kept_of_second + 3

    def read(self, rows: np.ndarray) -> TextBatch:
        """Returns pairs; see `TextSource.read`."""
        first = self._first.part(rows, 0, self._kept_of_first[rows])
        second = self._second.part(rows, 0, self._kept_of_second[rows])
        joined = self._tokenizer.join_pairs(first, second, self.length)
        return TextBatch.of(rows, *joined, labels=self.labels[rows])


def accuracy_and_f1(labels: np.ndarray, predictions: np.ndarray) -> dict[str, float]:
    """Returns `accuracy`, `f1` of class 1, and `accuracy_and_f1`, the mean of both.

    F1 is 0 if class 1 neither occurs nor is predicted.

    Args:
        labels: classes, `[rows]`, integers; at least one.
        predictions: classes that were predicted, `[rows]`, integers.
    """
    positive, predicted = labels == 1, predictions == 1
    accuracy = float(np.mean(labels == predictions))
    hits = int((positive & predicted).sum())
    f1 = 2 * hits / (int(positive.sum()) + int(predicted.sum())) if hits else 0.0
    return {"accuracy": accuracy, "f1": f1, "accuracy_and_f1": (accuracy + f1) / 2}


def majority_baseline(labels: np.ndarray) -> dict[str, float]:
    """Returns `accuracy_and_f1` of predicting the most frequent label, or the lowest of several."""
    return accuracy_and_f1(labels, np.full_like(labels, np.bincount(labels).argmax()))
