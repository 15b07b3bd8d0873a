"""The random samples of Meta's DLRM, which Habana's medium configuration is trained on."""

import numpy as np

from dlrm.data.clicks.batch import Batch
from dlrm.data.clicks.synthetic import SyntheticDataset

_NUM_ID_BITS = 32  # ids are below 2**31


class RandomDataset(SyntheticDataset):
    """Random samples: numericals and targets uniform in [0, 1), ids uniform over their table.

    With `hotness` a bag draws round(max(1, U * hotness)) ids, each round(U * (rows - 1)), where U
    is uniform in [0, 1). Repeated ids are kept once, in ascending order (facebookresearch/dlrm,
    `generate_uniform_input_batch`).

    Batches are made on the CPU, so that they are the same on every device. 512 samples of 1024
    numericals and one table of 3 million rows with a hotness of 38 take 1.3 ms (Xeon, one thread).

    The arguments are those of `SyntheticDataset`, except `ids` and `device`.
    """

    def batch(self, index: int) -> Batch:
        """Returns a batch; see `ClickDataset.batch`. Labels are fractions, not 0 or 1."""
        start, stop = self.rows(index)
        random = np.random.Generator(np.random.SFC64([*self._seed, index]))
        ids, lengths = self._draw_ids(random, stop - start)
        numerical = random.random((stop - start, self.num_numerical), np.float32)
        targets = random.random(stop - start, np.float32)
        return Batch.from_numpy(numerical, ids, targets, lengths)

    def _draw_ids(
        self, random: np.random.Generator, num_samples: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns the ids, and the lengths of bags, if any; see `Batch`."""
        shape = (num_samples, len(self.table_sizes))
        last = np.broadcast_to(np.array(self.table_sizes, np.int64) - 1, shape)
        if self._hotness is None:
            return np.rint(random.random(shape) * last).astype(np.int32), None
        drawn = np.rint(np.maximum(1, random.random(shape) * self._hotness)).astype(np.int64)
        bags = np.arange(drawn.size).repeat(drawn.ravel())
        ids = np.rint(random.random(len(bags)) * last.ravel()[bags]).astype(np.int64)
        different = np.unique(bags << _NUM_ID_BITS | ids)
        lengths = np.bincount(different >> _NUM_ID_BITS, minlength=drawn.size)
        ids = different & ((1 << _NUM_ID_BITS) - 1)
        return ids.astype(np.int32), lengths.reshape(shape).astype(np.int32)
