"""Image classification: a ResNet or EfficientNet, cross-entropy, top-1 and top-5."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlrm.distributed import World, all_sum
from dlrm.settings import check_settings, setting
from dlrm.tasks.network_task import Judge, NetworkTask
from dlrm.train.config import PrecisionConfig
from dlrm.train.execution import ExecutionConfig
from dlrm.train.log import Loader
from dlrm.vision import efficientnet, resnet
from dlrm.vision.augmentation import Augmentation, Prepared
from dlrm.vision.blocks import NORMS
from dlrm.vision.loader import ImageBatch

MODELS = (*resnet.VARIANTS, *efficientnet.VARIANTS)
_RESNET_ONLY = ("zero_init_residual", "depths")
_EFFICIENTNET_ONLY = ("group_dim", "expand_ratio", "dropout", "drop_path", "width")


@dataclass(frozen=True)
class NetworkConfig:
    """An image network; field names are those of the flags, and None is the network's own default.

    Raises:
        ValueError: an unknown model, or a flag of another model; the message names flag and value.
    """

    model: str = setting("resnet50", "Network", choices=MODELS, architecture=True)
    num_classes: int = setting(
        1000, "Number of classes of random data; a dataset states its own", architecture=True
    )
    norm: str = setting(
        "batch",
        "Normalization over a batch or over groups of channels",
        choices=NORMS,
        architecture=True,
    )
    groups: int | None = setting(
        None,
        "Number of groups of --norm group; default: 32, or 4 for EfficientNet",
        architecture=True,
    )
    norm_eps: float | None = setting(
        None,
        "Added to the variances in normalization; default: 1e-5, or 1e-3 for EfficientNet",
        architecture=True,
    )
    norm_momentum: float = setting(
        0.1, "Weight of the newest batch in the running averages of batch normalization"
    )
    zero_init_residual: bool = setting(
        False, "Initialize each residual block of a ResNet as the identity"
    )
    group_dim: int | None = setting(
        None,
        "Channels per group of EfficientNet's spatial convolutions; default: 1, depthwise",
        architecture=True,
    )
    expand_ratio: int | None = setting(
        None,
        "Ratio of the inner to the outer width of EfficientNet's blocks; default: 6",
        architecture=True,
    )
    dropout: float | None = setting(
        None,
        "Dropout probability before EfficientNet's last layer; default: 0.2 for B0, 0.4 for B4",
    )
    drop_path: float | None = setting(
        None,
        "Probability that training skips EfficientNet's last block, less for earlier blocks; "
        "default: 0.2",
    )
    depths: tuple[int, ...] | None = setting(
        None,
        "Number of blocks of a ResNet's four stages; default: 3,4,6,3, or 3,4,23,3 for ResNeXt-101",
        architecture=True,
    )
    width: float | None = setting(
        None,
        "Multiplier of EfficientNet's channels; default: 1.0 for B0, 1.4 for B4",
        architecture=True,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        is_resnet = self.model in resnet.VARIANTS
        for flag in _EFFICIENTNET_ONLY if is_resnet else _RESNET_ONLY:
            if (value := getattr(self, flag)) is not None and value is not False:
                shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
                raise ValueError(f"--{flag} {shown}: {self.model} has none")

    def build(self, seed: int = 0) -> nn.Module:
        """Returns the network with its initial weights."""
        is_resnet = self.model in resnet.VARIANTS
        own = _RESNET_ONLY if is_resnet else _EFFICIENTNET_ONLY
        names = ("num_classes", "norm", "groups", "norm_eps", "norm_momentum", *own)
        given = {n: getattr(self, n) for n in names if getattr(self, n) is not None}
        make = resnet.ResNet if is_resnet else efficientnet.EfficientNet
        return make(self.model, seed=seed, **given)


@dataclass(frozen=True)
class ImageLossConfig:
    """The loss of an image network; field names are those of the command line's flags.

    Raises:
        ValueError: a value is impossible; the message names flag and value.
    """

    label_smoothing: float = setting(
        0.0,
        "Share of the target distribution that label smoothing spreads over other classes; 0: none",
        least=0,
        below=1,
    )
    label_smoothing_style: str = setting(
        "torch",
        "torch: --label_smoothing is spread over all K classes; tf: over the K - 1 wrong ones",
        choices=("torch", "tf"),
    )

    def __post_init__(self) -> None:
        check_settings(self)

    def total(self, logits: Tensor, prepared: Prepared) -> Tensor:
        """Returns the sum of the samples' cross-entropies; several labels may share a sample."""
        classes = logits.shape[1]
        share = self.label_smoothing
        if self.label_smoothing_style == "tf" and classes > 1:
            share *= classes / (classes - 1)
        likelihoods = F.log_softmax(logits.float(), dim=1)
        loss = -(prepared.weights * likelihoods.gather(1, prepared.labels)).sum()
        return (1 - share) * loss - share * likelihoods.mean(dim=1).sum() if share else loss


class ImageClassification(NetworkTask):
    """An image network to train.

    Args:
        network: the architecture.
        augmentation: conversion of stored images to inputs.
        loss: training loss of the logits; tests use plain cross-entropy.
        precision: precision of weights and layers.
        execution: execution of the network.
        world: the processes that train together.
        seed: seed of the initial weights.
        channels_last: store a pixel's channels together in memory.
    """

    metric = "top1"

    def __init__(
        self,
        network: NetworkConfig,
        augmentation: Augmentation = Augmentation(),
        loss: ImageLossConfig = ImageLossConfig(),
        precision: PrecisionConfig = PrecisionConfig(),
        execution: ExecutionConfig = ExecutionConfig(),
        world: World = World(),
        seed: int = 0,
        channels_last: bool = False,
    ):
        self.augmentation, self._loss = augmentation, loss
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        model = network.build(seed)
        model.to(memory_format=self._format)  # type: ignore[call-overload]
        super().__init__(model, precision, execution, world)

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
