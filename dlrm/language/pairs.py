"""Pairs of sentences with a class, as in the Microsoft Research Paraphrase Corpus (MRPC)."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from dlrm.language.loader import TextBatch
from dlrm.language.wordpiece import Slices, Tokenizer

LABEL, FIRST, SECOND = "Quality", "#1 String", "#2 String"
COLUMNS = (LABEL, "#1 ID", "#2 ID", FIRST, SECOND)
_COLUMNS_WITHOUT_LABELS = ("index", *COLUMNS[1:])  # of GLUE's test set
_SHOWN = 120  # characters of a wrong first line


class Pairs(NamedTuple):
    """Pairs of sentences of a file, and whether the two of a pair have the same meaning.

    Attributes:
        first: first sentence of each pair.
        second: second sentence of each pair.
        labels: 1 if they have the same meaning, else 0, int64; None if unknown.
    """

    first: list[str]
    second: list[str]
    labels: np.ndarray | None


def read_pairs(path: str | Path) -> Pairs:
    """Returns the pairs of a tab-separated file with MRPC's columns, without quoting.

    Its first line has their names: `COLUMNS`, or "index" as the first one if labels are unknown.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not UTF-8, has other columns or no pair, or a line has another
            number of fields or a label other than 0 and 1; the message has file, line and value.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}: line {line}: not UTF-8") from error
    header, *rows = [
        line.removesuffix("\r").split("\t") for line in text.rstrip("\r\n").split("\n")
    ]
    if tuple(header) not in (COLUMNS, _COLUMNS_WITHOUT_LABELS):
        got = ", ".join(header)
        got = got if len(got) <= _SHOWN else f"{got[:_SHOWN]}..."
        raise ValueError(f"{path}: line 1: expected the columns {', '.join(COLUMNS)}, got {got}")
    if not rows:
        raise ValueError(f"{path}: expected at least one pair, got none")
    has_labels = header[0] == LABEL
    for number, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise ValueError(
                f"{path}: line {number}: expected {len(header)} fields, got {len(row)}"
            )
        if has_labels and row[0] not in ("0", "1"):
            raise ValueError(f"{path}: line {number}: {LABEL}: expected 0 or 1, got {row[0]!r}")
    labels, _, _, first, second = zip(*rows, strict=True)
    return Pairs(
        list(first), list(second), np.array(labels).astype(np.int64) if has_labels else None
    )


class SentencePairs:
    """Rows of [CLS] first [SEP] second [SEP] with a label: a `TextSource`.

    If a pair has more than `max_seq_length` - 3 tokens, the longer sentence, or else the second,
    loses its last token until the pair fits.

    Args:
        path: the file; see `read_pairs`, whose errors are raised as well.
        max_seq_length: tokens of a row.

    Attributes:
        labels: label of each row, `[num_samples]`, int64; None if unknown.

    Raises:
        ValueError: the length is impossible; the message names flag and value.
    """

    num_masked: np.ndarray | None = None

    def __init__(self, path: str | Path, tokenizer: Tokenizer, max_seq_length: int = 128) -> None:
        room = max_seq_length - 3
        if room < 2:
            raise ValueError(f"--max_seq_length {max_seq_length}: expected 5 or more")
        pairs = read_pairs(path)
        self.length, self.labels, self._tokenizer = max_seq_length, pairs.labels, tokenizer
        self.num_samples = len(pairs.first)
        self._first, self._second = tokenizer.encode(pairs.first), tokenizer.encode(pairs.second)
        first, second = self._first.lengths, self._second.lengths
        kept = np.minimum(first, np.maximum(room - second, -(-room // 2)))
        self._first_lengths = np.where(first + second > room, kept, first)
        self._second_lengths = np.minimum(second, room - self._first_lengths)
        self.lengths = self._first_lengths + self._second_lengths + 3

    def read(self, rows: np.ndarray) -> TextBatch:
        """Returns pairs; see `TextSource.read`."""
        joined = self._tokenizer.join_pairs(
            Slices(self._first.ids, self._first.starts[rows], self._first_lengths[rows]),
            Slices(self._second.ids, self._second.starts[rows], self._second_lengths[rows]),
            self.length,
        )
        return TextBatch.of(
            rows, *joined, labels=None if self.labels is None else self.labels[rows]
        )


def accuracy_and_f1(labels: np.ndarray, predictions: np.ndarray) -> dict[str, float]:
    """Returns `accuracy`, `f1` of class 1, and `accuracy_and_f1`, the mean of both.

    F1 is 0 if class 1 neither occurs nor is predicted.

    Args:
        labels: classes, `[rows]`, integers.
        predictions: classes that were predicted, `[rows]`, integers.

    Raises:
        ValueError: their numbers differ or are 0; the message has both.
    """
    if len(labels) != len(predictions) or not len(labels):
        raise ValueError(
            f"accuracy: expected as many predictions as labels and at least one, got "
            f"{len(predictions)} and {len(labels)}"
        )
    positive, predicted = labels == 1, predictions == 1
    accuracy = float(np.mean(labels == predictions))
    hits = int((positive & predicted).sum())
    f1 = 2 * hits / (int(positive.sum()) + int(predicted.sum())) if hits else 0.0
    return {"accuracy": accuracy, "f1": f1, "accuracy_and_f1": (accuracy + f1) / 2}


def majority_baseline(labels: np.ndarray) -> dict[str, float]:
    """Returns `accuracy_and_f1` of predicting the most frequent label, or the lowest of several."""
    return accuracy_and_f1(labels, np.full_like(labels, np.bincount(labels).argmax()))
