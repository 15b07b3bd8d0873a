"""Image datasets, on disk or generated, and the loader that prefetches their batches."""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from dlrm.data.prefetch import BatchedRows
from dlrm.data.row_loader import RowLoader
from dlrm.data.verification import Verifier
from dlrm.distributed import World
from dlrm.vision import layout as image_layout

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
        return self._replace(
            images=function(self.images), labels=function(self.labels), draws=function(self.draws)
        )

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
    """Images that can be read in any order.

    Attributes:
        num_samples: number of images.
        num_classes: labels are in [0, num_classes).
        size: height and width of the images.
    """

    num_samples: int
    num_classes: int
    size: int

    def read(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Returns images `[rows, 3, size, size]`, uint8, and labels `[rows]`, int64."""
        ...


class ImageDataset:
    """One split of a dataset that `dlrm prepare-images` wrote, memory-mapped.

    Args:
        split: "train", "test" or "validation".
        verify_data: whether and when to compare files with their checksums; see `Verifier`.
        allow_links: whether files may be symbolic links out of the directory.

    Attributes:
        classes: names of the classes; a label is an index of it.

    Raises:
        FileNotFoundError: there is no manifest, no such split, or a file is missing.
        ValueError: the manifest is wrong, a file's size differs from it, a file is damaged, or a
            label is out of range.
    """

    def __init__(
        self,
        directory: str | Path,
        split: str,
        verify_data: str = "first",
        allow_links: bool = False,
    ) -> None:
        directory = Path(directory)
        contents = image_layout.read_contents(directory, allow_links)
        verifier = Verifier(directory, image_layout.KIND, verify_data, allow_links)
        if split not in contents.splits:
            raise FileNotFoundError(
                f"{directory}: expected a split {split}, has {', '.join(contents.splits)}"
            )
        self.size, self.classes = contents.size, contents.classes
        self.num_classes = len(self.classes)
        counts = contents.splits[split]
        self.num_samples = sum(counts)
        self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self._images, labels = [], [np.empty(0, image_layout.LABEL_DTYPE)]
        files = [image_layout.shard_files(directory, split, n) for n in range(len(counts))]
        verifier.check(path for pair in files for path in pair)
        for shard in range(len(counts)):
            images, labels_of_shard = image_layout.open_shard(directory, contents, split, shard)
            self._images.append(images)
            labels.append(labels_of_shard)
        self._labels = np.concatenate(labels)

    def read(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Returns images and labels; see `ImageSource.read`."""
        images = np.empty((len(rows), image_layout.CHANNELS, self.size, self.size), np.uint8)
        shards = np.searchsorted(self._starts, rows, side="right") - 1
        for place, (shard, row) in enumerate(zip(shards, rows - self._starts[shards], strict=True)):
            images[place] = self._images[shard][row]
        return torch.from_numpy(images), torch.from_numpy(self._labels[rows].astype(np.int64))


class GeneratedImages:
    """One random image, made once on the host and copied for every row; labels are random.

    The values are normal with mean 127 and deviation 60, within [0, 255].

    Args:
        size: height and width.
        num_classes: labels are in [0, num_classes).
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
        order: see `RowLoader`, also for errors.
    """

    row = "image"

    def __init__(
        self, source: ImageSource, batch_size: int, *, num_partners: int = 0, **order: Any
    ) -> None:
        super().__init__(source.num_samples, batch_size, **order)
        self.source, self._num_partners = source, num_partners

    def epoch(self, epoch: int) -> "Epoch":
        """Returns the batches of an epoch, to be read in any order."""
        order, keys = self._order(epoch), (self._seed, epoch)
        return Epoch(self.source, self._batches, order, keys, self._world, self._num_partners)


class Epoch(NamedTuple):
    """Batches of one epoch of an `ImageLoader`."""

    source: ImageSource
    batches: BatchedRows
    order: np.ndarray
    keys: tuple[int, int]
    world: World
    num_partners: int

    def batch(self, index: int) -> ImageBatch:
        """Returns a batch, which depends on `index` and on nothing that was read before."""
        first, last = self.batches.rows(index)
        size, rank, ranks = last - first, self.world.rank, self.world.size
        begin, end = size * rank // ranks, size * (rank + 1) // ranks
        places = np.arange(begin - self.num_partners, end) % size
        images, labels = self.source.read(self.order[first + places])
        draws = _draws((*self.keys, index), size)[places]
        return ImageBatch(images, labels, torch.from_numpy(draws), size, self.num_partners)


def _draws(keys: tuple[int, ...], rows: int) -> np.ndarray:
    """Returns numbers in [0, 1) that depend only on the keys, which numpy guarantees."""
    bits = np.random.SFC64(list(keys)).random_raw(rows * NUM_DRAWS)
    draws = (bits >> np.uint64(11)).astype(np.float64).reshape(rows, NUM_DRAWS) * 2.0**-53
    draws[:, -NUM_SHARED_DRAWS:] = draws[:1, -NUM_SHARED_DRAWS:]
    return draws


class SyntheticImages:
    """A loader of one constant random batch, made once on the device, without any input.

    Args:
        num_samples: images of an epoch, all ranks together; a last incomplete batch is left out.
        size: height and width.
        num_classes: labels are in [0, num_classes).
        world: determines this process's rows, and the device.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        size: int = 224,
        num_classes: int = 1000,
        seed: int = 0,
        world: World = World(),
    ) -> None:
        source = GeneratedImages(batch_size, size, num_classes, seed)
        loader = ImageLoader(source, batch_size, world=world)
        self._num_batches = num_samples // batch_size
        self.num_samples = self._num_batches * batch_size
        if not self._num_batches:
            raise ValueError(
                f"--batch_size {batch_size}: expected at least one whole batch, got {num_samples} "
                "images"
            )
        self._batch = loader.epoch(0).batch(0).map(lambda tensor: tensor.to(world.device))

    def __len__(self) -> int:
        return self._num_batches

    def batches(self, epoch: int = 0, start: int = 0) -> Generator[ImageBatch, None, None]:
        """Yields the same batch again and again."""
        for _ in range(start, len(self)):
            yield self._batch
