"""Random tokens for every language task, and the architecture of a small network."""

import numpy as np
import torch

from dlrm.language.bert import BertConfig
from dlrm.language.loader import NO_TOKEN, TextBatch

LENGTH, WORDS, PREDICTIONS = 24, 50, 4
SMALL = {
    **{"num_layers": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32},
    **{"vocab_size": WORDS, "max_position_embeddings": 32},
}
STILL = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def small(**options) -> BertConfig:
    return BertConfig(**{**SMALL, **options})


class Rows:
    """A `TextSource` whose rows have 8 or more tokens, labels, spans and masked tokens."""

    def __init__(self, num_samples: int, seed: int = 0, padded: bool = True):
        random = np.random.default_rng(seed)
        self.num_samples, self.length = num_samples, LENGTH
        self.lengths = random.integers(8, LENGTH + 1, num_samples)
        if not padded:
            self.lengths[:] = LENGTH
        inside = np.arange(LENGTH) < self.lengths[:, None]
        self._ids = np.where(inside, random.integers(1, WORDS, inside.shape), 0).astype(np.int32)
        self._segments = (inside & (np.arange(LENGTH) >= 5)).astype(np.int8)
        self.num_masked = random.integers(1, PREDICTIONS + 1, num_samples)
        used = np.arange(PREDICTIONS) < self.num_masked[:, None]
        positions = random.random((num_samples, 8)).argsort(axis=1)[:, :PREDICTIONS]
        masked = random.integers(1, WORDS, used.shape)
        self._positions = np.where(used, positions, 0).astype(np.int32)
        self._masked = np.where(used, masked, NO_TOKEN).astype(np.int32)
        self._labels = random.integers(0, 2, num_samples)
        first = random.integers(0, 6, num_samples)
        self._spans = np.stack([first, first + random.integers(0, 3, num_samples)], axis=1)

    def read(self, rows: np.ndarray) -> TextBatch:
        names = ("_ids", "_segments", "lengths", "_labels", "_spans", "_positions", "_masked")
        arrays = [torch.from_numpy(getattr(self, name)[rows]) for name in names]
        ids, segments, lengths, *rest = arrays
        return TextBatch(ids, segments, lengths.int(), torch.from_numpy(rows).long(), *rest)
