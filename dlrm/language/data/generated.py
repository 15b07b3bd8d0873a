"""Random rows of the three kinds of language tasks, for benchmarks: no text, no tokenizer."""

import numpy as np
import torch

from dlrm.language.data.loader import NO_TOKEN, TextBatch

KINDS = ("pretrain", "squad", "pairs")
_MOST = 1024  # distinct rows; others are copies of them


class GeneratedText:
    """Random tokens, made once on the host, from which rows are copied when they are read.

    Args:
        kind: "pretrain" has masked tokens and next-sentence labels, "squad" spans, "pairs" labels.
        num_samples: number of rows; beyond 1,024, row i repeats row i modulo 1,024.
        length: tokens of a row with its padding, at least 8.
        vocab_size: ids are in [1, vocab_size), 0 where there is padding.
        max_predictions: masked tokens of each row, at least 1; at most half of a row's tokens are
            masked.
        num_labels: labels of "pairs" are in [0, num_labels).
        seed: seed of all random numbers.
        lengths: "full" rows without padding, or "random" ones of at least 8 tokens.
    """

    def __init__(
        self,
        kind: str,
        num_samples: int,
        *,
        length: int = 128,
        vocab_size: int = 30522,
        max_predictions: int = 20,
        num_labels: int = 2,
        seed: int = 0,
        lengths: str = "full",
    ) -> None:
        _check(kind, lengths, num_samples, length, vocab_size, max_predictions)
        self.num_samples, self.length = num_samples, length
        random = np.random.default_rng(seed)
        made = min(num_samples, _MOST)
        least_own = 8 if lengths == "random" else length
        num_tokens = random.integers(least_own, length + 1, made)
        column = np.arange(length)
        ids = random.integers(1, vocab_size, (made, length), np.int32)
        ids[column >= num_tokens[:, None]] = 0
        second = random.integers(2, num_tokens - 1)
        segments = (column >= second[:, None]) & (column < num_tokens[:, None])
        labels = spans = positions = masked = None
        num_masked = None
        if kind == "pretrain":
            labels = random.integers(0, 2, made)
            num_masked = np.minimum(max_predictions, num_tokens // 2)
            positions, masked = _masked(random, num_tokens, num_masked, max_predictions, vocab_size)
        elif kind == "squad":
            spans = np.sort(random.integers(0, num_tokens[:, None], (made, 2)), axis=1)
        else:
            labels = random.integers(0, num_labels, made)
        self._batch = TextBatch(
            torch.from_numpy(ids),
            torch.from_numpy(segments.astype(np.int8)),
            torch.from_numpy(num_tokens.astype(np.int32)),
            torch.arange(made),
            labels=_tensor(labels),
            spans=_tensor(spans),
            masked_positions=_tensor(positions),
            masked_ids=_tensor(masked),
        )
        copies = np.arange(num_samples) % made
        self.lengths = num_tokens[copies]
        self.num_masked = None if num_masked is None else num_masked[copies]

    def read(self, rows: np.ndarray) -> TextBatch:
        """Returns rows; see `TextSource.read`."""
        made = torch.from_numpy(rows % len(self._batch.ids))
        batch = self._batch.map(lambda tensor: tensor[made])
        return batch._replace(indices=torch.from_numpy(rows.astype(np.int64)))


def _check(kind: str, lengths: str, *sizes: int) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    if lengths not in ("full", "random"):
        raise ValueError(f"lengths: expected full or random, got {lengths!r}")
    least = {"num_samples": 1, "length": 8, "vocab_size": 2, "max_predictions": 1}
    for (name, minimum), value in zip(least.items(), sizes, strict=True):
        if value < minimum:
            raise ValueError(f"{name}: expected {minimum} or more, got {value}")


def _tensor(array: np.ndarray | None) -> torch.Tensor | None:
    return None if array is None else torch.from_numpy(array)


def _masked(
    random: np.random.Generator,
    ends: np.ndarray,
    num_masked: np.ndarray,
    most: int,
    vocab_size: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns ascending positions of masked tokens, neither first nor last, and the tokens."""
    made, length = len(ends), int(ends.max())
    keys = random.random((made, length))
    column = np.arange(length)
    keys[(column == 0) | (column >= ends[:, None] - 1)] = 2
    chosen = np.argsort(keys, axis=1)[:, :most]
    positions = np.pad(chosen, ((0, 0), (0, most - chosen.shape[1])))
    unused = np.arange(most) >= num_masked[:, None]
    positions[unused] = length
    positions.sort(axis=1)
    masked = random.integers(1, vocab_size, (made, most), np.int32)
    positions[unused], masked[unused] = 0, NO_TOKEN
    return positions.astype(np.int32), masked
