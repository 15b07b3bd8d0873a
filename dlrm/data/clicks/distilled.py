"""Training batches whose labels are mixed with the probabilities of a trained model."""

from threading import Lock
from typing import Any

import torch

from dlrm.data.clicks.batch import Batch, ClickDataset
from dlrm.distributed import World


class Distilled:
    """The batches that a process reads, with labels `(1 - weight) * label + weight * taught`.

    The cross-entropy is linear in the label, so the loss is the same mixture (Hinton et al., 2015,
    arXiv 1503.02531, at temperature 1).

    Args:
        dataset: this process's part of `whole`, whose ids the teacher needs.
        teacher: the network of a trained model.
    """

    def __init__(
        self, dataset: ClickDataset, whole: ClickDataset, teacher: Any, weight: float, world: World
    ) -> None:
        self._dataset, self._whole, self._world = dataset, whole, world
        self._teacher, self._weight = teacher, weight
        self._one_at_a_time = Lock()  # batches are read by several threads

    def batch(self, index: int) -> Batch:
        """Returns a batch, which depends on `index` alone; see `ClickDataset.batch`."""
        batch = taught = self._dataset.batch(index)
        if self._world.size > 1:
            whole = self._whole.batch(index)
            taught = whole.samples(self._world.part(whole.num_samples))
        taught = taught.map(lambda tensor: tensor.to(self._world.device))
        ids = taught.categorical, taught.lengths
        with self._one_at_a_time, torch.no_grad():
            logits = self._teacher(taught.numerical, *ids, id_weights=taught.id_weights)
        labels = batch.labels.to(logits.device).lerp(logits.sigmoid(), self._weight)
        return batch._replace(labels=labels)
