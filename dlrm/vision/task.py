"""Image classification: a ResNet or EfficientNet, cross-entropy, top-1 and top-5."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dlrm.distributed import all_sum
from dlrm.tasks.networks.task import Judge, NetworkTask
from dlrm.train.log import Loader
from dlrm.vision.augmentation import Augmentation
from dlrm.vision.config import ImageLossConfig, NetworkConfig
from dlrm.vision.loader import ImageBatch


class ImageClassification(NetworkTask):
    """An image network to train.

    Args:
        augmentation: conversion of stored images to inputs.
        loss: training loss of the logits; tests use plain cross-entropy.
        channels_last: store a pixel's channels together in memory.
        others: see `NetworkTask`.
    """

    metric = "top1"

    def __init__(
        self,
        network: NetworkConfig,
        augmentation: Augmentation = Augmentation(),
        loss: ImageLossConfig = ImageLossConfig(),
        *,
        seed: int = 0,
        channels_last: bool = False,
        **others: Any,
    ):
        self.augmentation, self._loss = augmentation, loss
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        model = network.build(seed)
        model.to(memory_format=self._format)  # type: ignore[call-overload]
        super().__init__(model, **others)

    def predict(self, batch: ImageBatch) -> Tensor:
        """Returns the logits of this process's samples, float32 `[samples, num_classes]`."""
        return self._run(self._formatted(self.augmentation.evaluate(batch))).float()

    @torch.no_grad()
    def evaluate(self, loader: Loader) -> dict[str, float]:
        """Returns top-1, top-5 (of all classes if fewer) and mean cross-entropy."""
        sums = torch.zeros(4, dtype=torch.float64, device=self.world.device)
        with self._tested(loader) as batches:
            for batch in batches:
                logits, labels = self.predict(batch), batch.labels[batch.num_partners :]
                sums += _judge(logits, labels)
        loss, top1, top5, count = all_sum(sums, self.world).tolist()
        return {"top1": top1 / count, "top5": top5 / count, "loss": loss / count}

    def _problem(self, batch: ImageBatch) -> tuple[tuple[Tensor], Judge]:
        """Returns inputs and loss, the global batch's mean cross-entropy; see `NetworkTask`."""
        prepared = self.augmentation.train(batch)

        def judge(logits: Tensor) -> Tensor:
            return self._loss.total(logits.float(), prepared) / batch.global_size

        return (self._formatted(prepared.images),), judge

    def _formatted(self, images: Tensor) -> Tensor:
        return images.contiguous(memory_format=self._format)


def _judge(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns sums over samples: cross-entropy, hits among the best 1 and 5, and their number."""
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices
    hits = (best == labels[:, None]).cumsum(dim=1).double()  # CUDA's float order varies
    loss = F.cross_entropy(logits, labels, reduction="sum").double()
    count = loss.new_tensor(len(labels))
    return torch.stack([loss, hits[:, 0].sum(), hits[:, -1].sum(), count])
