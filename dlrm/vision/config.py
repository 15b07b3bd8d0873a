"""Image networks, their loss, their images and augmentation, as configurations without torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlrm.command_line import text_of
from dlrm.settings import check_settings, setting

if TYPE_CHECKING:
    from torch import Tensor

    from dlrm.vision.augmentation import Prepared
    from dlrm.vision.blocks import StagedNetwork

RESNETS = ("resnet50", "resnext101_32x4d")
EFFICIENTNETS = ("efficientnet_b0", "efficientnet_b4")
_RESNET_ONLY = ("zero_init_residual", "depths")
_EFFICIENTNET_ONLY = ("group_dim", "expand_ratio", "dropout", "drop_path", "width")


@dataclass(frozen=True)
class NetworkConfig:
    """An image network; field names are those of the flags, and None is the network's own default.

    Raises:
        ValueError: an unknown model, or a flag of another model; the message names flag and value.
    """

    model: str = setting(
        "resnet50", "Network", choices=(*RESNETS, *EFFICIENTNETS), architecture=True
    )
    num_classes: int = setting(
        1000, "Number of classes; class folders state their own", architecture=True, least=1
    )
    norm: str = setting(
        "batch",
        "Normalization over a batch or over groups of channels",
        choices=("batch", "group"),
        architecture=True,
    )
    groups: int | None = setting(
        None, "Groups of --norm group; default: 32, EfficientNet: 4", architecture=True, least=1
    )
    norm_eps: float | None = setting(
        None, "Added to variances; default: 1e-5, EfficientNet: 1e-3", architecture=True
    )
    norm_momentum: float = setting(
        0.1, "Weight of the newest batch in the running averages of batch normalization"
    )
    zero_init_residual: bool = setting(
        False, "Initialize each residual block of a ResNet as the identity"
    )
    group_dim: int | None = setting(
        None, "Channels a group of spatial convolutions; default: 1", architecture=True, least=1
    )
    expand_ratio: int | None = setting(
        None, "Inner over outer width of blocks; default: 6", architecture=True, least=1
    )
    dropout: float | None = setting(
        None, "Dropout before EfficientNet's last layer; default: B0 0.2, B4 0.4", least=0, below=1
    )
    drop_path: float | None = setting(
        None, "Probability that training skips the last block; default: 0.2", least=0, below=1
    )
    depths: tuple[int, ...] | None = setting(
        None,
        "Blocks of ResNet's stages; default: 3,4,6,3 or 3,4,23,3",
        architecture=True,
        least=1,
    )
    width: float | None = setting(
        None, "Factor of EfficientNet's channels; default: B0 1, B4 1.4", architecture=True, above=0
    )

    def __post_init__(self) -> None:
        check_settings(self)
        for flag in _EFFICIENTNET_ONLY if self.model in RESNETS else _RESNET_ONLY:
            if (value := getattr(self, flag)) is not None and value is not False:
                raise ValueError(f"--{flag} {text_of(value)}: {self.model} has none")
        if self.depths is not None and len(self.depths) != 4:
            raise ValueError(f"--depths {text_of(self.depths)}: expected four numbers")

    def build(self, seed: int = 0) -> "StagedNetwork":
        """Returns the network with its initial weights."""
        from dlrm.vision.efficientnet import EfficientNet
        from dlrm.vision.resnet import ResNet

        return (ResNet if self.model in RESNETS else EfficientNet)(self, seed)


@dataclass(frozen=True)
class ImageLossConfig:
    """The loss of an image network; field names are those of the command line's flags."""

    label_smoothing: float = setting(
        0.0, "Share of the target distribution spread over other classes", least=0, below=1
    )
    label_smoothing_style: str = setting(
        "torch",
        "Spread it over all K classes, or (tf) the wrong K - 1",
        choices=("torch", "tf"),
    )

    def __post_init__(self) -> None:
        check_settings(self)

    def total(self, logits: "Tensor", prepared: "Prepared") -> "Tensor":
        """Returns the sum of the samples' cross-entropies; several labels may share a sample."""
        classes = logits.shape[1]
        share = self.label_smoothing
        if self.label_smoothing_style == "tf" and classes > 1:
            share *= classes / (classes - 1)
        likelihoods = logits.float().log_softmax(dim=1)
        loss = -(prepared.weights * likelihoods.gather(1, prepared.labels)).sum()
        return (1 - share) * loss - share * likelihoods.mean(dim=1).sum() if share else loss


@dataclass(frozen=True)
class ImagesConfig:
    """Images in files; field names are those of the flags."""

    load_size: int = setting(
        256,
        "Height and width, in pixels, to which the largest centered square of an image is resized "
        "before the augmentation",
        architecture=True,
        least=1,
        most=4096,
    )
    test_fraction: float | None = setting(
        None,
        "Share of the images, always the same, that are for testing if --dataset is not split",
        above=0,
        below=1,
    )
    first_label: int = setting(1, "Lowest label of TFRecords, which becomes 0")

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True)
class AugmentationConfig:
    """The inputs made of images; field names are those of the flags."""

    image_size: int = setting(
        224, "Height and width of the network's input, in pixels", architecture=True, least=1
    )
    random_crop: bool = setting(True, "Train on resized random crops instead of center crops")
    min_area: float = setting(
        0.08, "Minimum area of a random crop, as a share of the image's", above=0, most=1
    )
    max_ratio: float = setting(
        4 / 3, "Maximum aspect ratio of a random crop; the minimum is its inverse", least=1
    )
    horizontal_flip: bool = setting(True, "Mirror half of the training images, at random")
    center_crop: float = setting(
        0.875, "Side of center crops of tests, as a share", architecture=True, above=0, most=1
    )
    normalize_input: bool = setting(
        True,
        "Subtract the channels' means and divide by their standard deviations; otherwise only "
        "subtract the means",
        architecture=True,
    )
    mixup_alpha: float = setting(
        0.0, "Parameter of the Beta distribution of mixup; 0: no mixup", least=0
    )
    cutmix_lambda: float = setting(
        1.0, "CutMix by Graphcore's rules, more often at lower values; 1: none", above=0, most=1
    )

    def __post_init__(self) -> None:
        check_settings(self)
