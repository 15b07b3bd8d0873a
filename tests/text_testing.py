"""A text source whose rows say their numbers."""

import numpy as np
import torch

from dlrm.language.loader import NO_TOKEN, TextBatch


class Numbered:
    """Fills row i with i + 1 up to its length; odd rows have two masked tokens, others one."""

    def __init__(self, lengths, length, masked=True):
        self.num_samples, self.length = len(lengths), length
        self.lengths = np.asarray(lengths)
        self.num_masked = 1 + np.arange(len(lengths)) % 2 if masked else None

    def read(self, rows):
        own = torch.from_numpy(self.lengths[rows]).view(-1, 1)
        inside = torch.arange(self.length) < own
        number = torch.from_numpy(rows).view(-1, 1)
        masked = torch.full((len(rows), 5), NO_TOKEN, dtype=torch.int32)
        masked[:, 0] = number[:, 0] + 1
        masked[number[:, 0] % 2 == 1, 1] = 7
        batch = TextBatch(
            torch.where(inside, number + 1, 0).int(),
            torch.zeros(len(rows), self.length, dtype=torch.int8),
            own[:, 0].int(),
            number[:, 0],
            labels=number[:, 0] % 2,
        )
        if self.num_masked is None:
            return batch
        return batch._replace(masked_positions=torch.zeros_like(masked), masked_ids=masked)


def assert_same(one, other):
    """Compares batches bit for bit; the same fields must be None."""
    for a, b in zip(one, other, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))
