"""Batches of images, and generated images."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from dlrm.data.row_loader import Epoch, RowLoader

NUM_DRAWS = 32  # random numbers per sample, as many as `dlrm.vision.augmentation` needs
NUM_SHARED_DRAWS = 4  # the last ones, which all samples of a global batch share


class ImageBatch(NamedTuple):
    """A process's rows of a global batch, as they are stored.

    The first `num_partners` rows are not the process's own. They precede its first row in the
    global batch, cyclically, and mixup and CutMix mix them into its own rows.

    Attributes:
        images: `[rows, 3, height, width]`, uint8.
        labels: `[rows]`, int64.
        draws: `[rows, NUM_DRAWS]`, float64, uniform in [0, 1), which determine the augmentation.
            The last NUM_SHARED_DRAWS are the same in all rows. They depend only on seed, epoch,
            batch and place in the global batch, not on the world or on the division of a batch.
        global_size: rows of the global batch.
        num_partners: number of rows before the process's own.
    """

    images: Tensor
    labels: Tensor
    draws: Tensor
    global_size: int
    num_partners: int = 0

    @property
    def num_samples(self) -> int:
        """Returns the number of the process's own rows."""
        return len(self.labels) - self.num_partners

    def map(self, function: Callable[[Tensor], Tensor]) -> "ImageBatch":
        """Returns the batch with `function` applied to each of its tensors."""
        images, labels, draws = map(function, self[:3])
        return self._replace(images=images, labels=labels, draws=draws)

    def split(self, parts: int) -> list["ImageBatch"]:
        """Splits its own rows into `parts`, or one per row if there are fewer; sizes differ by one.

        Each part has the partners it had in the whole, so that its augmentation is the same.
        """
        parts = max(1, min(parts, self.num_samples))
        bounds = [-(-self.num_samples * part // parts) for part in range(parts + 1)]
        return [
            self.map(lambda rows, a=a, b=b: rows[a : b + self.num_partners])  # type: ignore[misc]
            for a, b in zip(bounds[:-1], bounds[1:], strict=True)
        ]


class ImageSource(Protocol):
    """Images that can be read in any order, with labels in [0, num_classes)."""

    num_samples: int
    num_classes: int
    size: int  # height and width

    def read(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Returns images `[rows, 3, size, size]`, uint8, and labels `[rows]`, int64."""
        ...


class GeneratedImages:
    """One random image, made once on the host and copied for every row; labels are random.

    The values are normal with mean 127 and deviation 60, within [0, 255].
    """

    def __init__(
        self, num_samples: int, size: int = 224, num_classes: int = 1000, seed: int = 0
    ) -> None:
        self.num_samples, self.size, self.num_classes = num_samples, size, num_classes
        random = torch.Generator().manual_seed(seed)
        image = torch.empty(3, size, size)
        torch.nn.init.trunc_normal_(image, 127, 60, 0, 255, generator=random)
        self._image = image.to(torch.uint8)
        self._labels = torch.randint(num_classes, (num_samples,), generator=random)

    def read(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Returns images and labels; see `ImageSource.read`."""
        return self._image.repeat(len(rows), 1, 1, 1), self._labels[torch.from_numpy(rows)]


class ImageLoader(RowLoader[ImageBatch]):
    """Batches of a source, in a new order each epoch, prefetched by background threads.

    Rank r of W takes the rows [n * r // W, n * (r + 1) // W) of a global batch of n rows, and
    reads only `num_partners` rows besides these. The content of a batch depends only on the
    arguments, the epoch and its index.

    Args:
        num_partners: see `ImageBatch`; use `Augmentation.num_partners`.
        dtype: type of the images; float32 takes four times the bytes.
        order: see `RowLoader`, also for errors.
    """

    row = "image"

    def __init__(
        self,
        source: ImageSource,
        batch_size: int,
        *,
        num_partners: int = 0,
        dtype: torch.dtype = torch.uint8,
        **order: Any,
    ) -> None:
        super().__init__(source.num_samples, batch_size, **order)
        self._source, self._num_partners, self._dtype = source, num_partners, dtype

    def epoch(self, epoch: int) -> Epoch:
        """Returns the batches of an epoch, to be read in any order."""
        return Epoch(partial(self._batch, epoch, self._order(epoch)))

    def _batch(self, epoch: int, order: np.ndarray, index: int) -> ImageBatch:
        first, last = self._batches.rows(index)
        size, rank, ranks = last - first, self._world.rank, self._world.size
        begin, end = size * rank // ranks, size * (rank + 1) // ranks
        places = np.arange(begin - self._num_partners, end) % size
        images, labels = self._source.read(order[first + places])
        draws = torch.from_numpy(_draws((self._seed, epoch, index), size)[places])
        return ImageBatch(images.to(self._dtype), labels, draws, size, self._num_partners)


def _draws(keys: tuple[int, ...], rows: int) -> np.ndarray:
    """Returns numbers in [0, 1) that depend only on the keys, which numpy guarantees."""
    bits = np.random.SFC64(list(keys)).random_raw(rows * NUM_DRAWS)
    draws = (bits >> np.uint64(11)).astype(np.float64).reshape(rows, NUM_DRAWS) * 2.0**-53
    draws[:, -NUM_SHARED_DRAWS:] = draws[:1, -NUM_SHARED_DRAWS:]
    return draws
