"""Random rows of the three kinds of language tasks, for benchmarks: no text, no tokenizer."""

import numpy as np
import torch

from dlrm.language.loader import NO_TOKEN, TextBatch

KINDS = ("pretrain", "squad", "mrpc")
_MOST = 1024  # distinct rows; others are copies of them


class GeneratedText:
    """Random tokens, made once on the host, from which rows are copied when they are read.

    Args:
        kind: "pretrain" has masked tokens and next-sentence labels, "squad" spans, "mrpc" labels.
        num_samples: number of rows; beyond 1,024, row i repeats row i modulo 1,024.
        length: tokens of a row with its padding, at least 8.
        vocab_size: ids are in [1, vocab_size), 0 where there is padding.
        max_predictions: masked tokens of each row, at least 1; at most half of a row's tokens are
            masked.
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
        seed: int = 0,
        lengths: str = "full",
    ) -> None:
        sizes = {"synthetic_dataset_num_entries": (num_samples, 1), "max_seq_length": (length, 8)}
        sizes |= {"vocab_size": (vocab_size, 2), "max_predictions_per_seq": (max_predictions, 1)}
        for name, (value, least) in sizes.items():
            if value < least:
                raise ValueError(f"--{name} {value}: expected {least} or more")
        self.num_samples, self.length = num_samples, length
        random = np.random.default_rng(seed)
        made = min(num_samples, _MOST)
        own = random.integers(8 if lengths == "random" else length, length + 1, made)
        column = np.arange(length)
        ids = random.integers(1, vocab_size, (made, length), np.int32)
        ids[column >= own[:, None]] = 0
        second = random.integers(2, own - 1)
        segments = (column >= second[:, None]) & (column < own[:, None])
        others, num_masked = {}, None
        if kind == "squad":
            others["spans"] = np.sort(random.integers(0, own[:, None], (made, 2)), axis=1)
        else:
            others["labels"] = random.integers(0, 2, made)
        if kind == "pretrain":
            num_masked = np.minimum(max_predictions, own // 2)
            positions = _positions(random, own, num_masked, max_predictions)
            masked = random.integers(1, vocab_size, (made, max_predictions), np.int32)
            masked[np.arange(max_predictions) >= num_masked[:, None]] = NO_TOKEN
            others |= {"masked_positions": positions, "masked_ids": masked}
        tokens = (ids, segments.astype(np.int8), own.astype(np.int32))
        self._batch = TextBatch.of(np.arange(made), *tokens, **others)
        copies = np.arange(num_samples) % made
        self.lengths = own[copies]
        self.num_masked = None if num_masked is None else num_masked[copies]

    def read(self, rows: np.ndarray) -> TextBatch:
        """Returns rows; see `TextSource.read`."""
        made = torch.from_numpy(rows % len(self._batch.ids))
        numbers = torch.from_numpy(np.asarray(rows, np.int64))
        return self._batch.map(lambda tensor: tensor[made])._replace(indices=numbers)


def _positions(
    random: np.random.Generator, ends: np.ndarray, num_masked: np.ndarray, most: int
) -> np.ndarray:
    """Returns ascending positions of masked tokens, neither first nor last, and then zeros."""
    made, length = len(ends), int(ends.max())
    keys = random.random((made, length))
    column = np.arange(length)
    keys[(column == 0) | (column >= ends[:, None] - 1)] = 2
    chosen = np.argsort(keys, axis=1)[:, :most]
    positions = np.pad(chosen, ((0, 0), (0, most - chosen.shape[1])))
    unused = np.arange(most) >= num_masked[:, None]
    positions[unused] = length
    positions.sort(axis=1)
    positions[unused] = 0
    return positions.astype(np.int32)
