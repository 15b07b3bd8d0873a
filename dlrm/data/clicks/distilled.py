"""Training batches whose labels are mixed with the probabilities of a trained model."""

from collections.abc import Callable

from torch import Tensor

from dlrm.data.clicks.batch import Batch, ClickDataset
from dlrm.distributed import World


class Distilled:
    """The batches that a process reads, with labels `(1 - weight) * label + weight * taught`.

    The cross-entropy is linear in the label, so the loss is the same mixture of that to the labels
    and that to the teacher's probabilities (Hinton et al., 2015, arXiv 1503.02531, at temperature
    1). A process computes the probabilities of its own samples.

    Args:
        dataset: this process's part of the dataset.
        whole: the dataset as a single process would read it; several processes read it as well,
            since the teacher needs the ids of all tables.
        teacher: returns the probabilities of the samples of a batch, `[samples]`.
        weight: weight of the teacher, in (0, 1].
    """

    def __init__(
        self,
        dataset: ClickDataset,
        whole: ClickDataset,
        teacher: Callable[[Batch], Tensor],
        weight: float,
        world: World = World(),
    ) -> None:
        self._dataset, self._whole, self._world = dataset, whole, world
        self._teacher, self._weight = teacher, weight

    def batch(self, index: int) -> Batch:
        """Returns a batch, which depends on `index` alone; see `ClickDataset.batch`."""
        batch = taught = self._dataset.batch(index)
        if self._world.size > 1:
            whole = self._whole.batch(index)
            taught = whole.samples(self._world.part(whole.num_samples))
        probabilities = self._teacher(taught)
        labels = batch.labels.to(probabilities.device)
        return batch._replace(labels=labels.lerp(probabilities, self._weight))
