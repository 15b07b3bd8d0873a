"""EfficientNet B0 and B4 for images, with depthwise or grouped convolutions, as named stages.

Parameters have the names of timm's models, so that their checkpoints load unchanged.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from dlrm.model.layers.initialize import materialize
from dlrm.vision.blocks import GlobalMean, NewNorm, StagedNetwork, draw_weight, norm_layers

if TYPE_CHECKING:
    from dlrm.vision.config import NetworkConfig


class _Variant(NamedTuple):
    width: float
    depth: float
    dropout: float


VARIANTS = {
    "efficientnet_b0": _Variant(1.0, 1.0, 0.2),
    "efficientnet_b4": _Variant(1.4, 1.8, 0.4),
}
_STAGES = (  # kernel, repeats, channels, stride (Tan and Le, 2019, table 1)
    (3, 1, 16, 1),
    (3, 2, 24, 2),
    (5, 2, 40, 2),
    (3, 3, 80, 2),
    (5, 3, 112, 1),
    (5, 4, 192, 2),
    (3, 1, 320, 1),
)


class EfficientNet(StagedNetwork):
    """EfficientNet (Tan and Le, 2019), and with grouped convolutions (Masters et al., 2021).

    A spatial convolution of width w has max(w // group_dim, 1) groups, which must divide it. The
    first stage has an `expand_ratio` of 1. `drop_path` is that of the last block, and linear in the
    block's index from 0 (Huang et al., 2016). All channels, times `width`, are rounded to multiples
    of 8. timm's `norm_eps` is 1e-5.
    """

    def __init__(self, config: "NetworkConfig", seed: int = 0) -> None:
        super().__init__()
        variant = VARIANTS[config.model]
        width = variant.width if config.width is None else config.width
        dropout = variant.dropout if config.dropout is None else config.dropout
        drop_path = 0.2 if config.drop_path is None else config.drop_path
        expand_ratio, group_dim = config.expand_ratio or 6, config.group_dim or 1
        new_norm = norm_layers(config, groups=4, eps=1e-3)
        depths = [math.ceil(repeats * variant.depth) for _, repeats, _, _ in _STAGES]
        drops = (drop_path * index / (sum(depths) - 1) for index in range(sum(depths)))
        stem, head = (_round_channels(channels * width) for channels in (32, 1280))
        device, channels = torch.get_default_device(), stem
        with torch.device("meta"):
            self.conv_stem = nn.Conv2d(3, stem, 3, stride=2, padding=1, bias=False)
            self.bn1 = new_norm(stem)
            self.blocks = nn.ModuleList()
            for (kernel, _, outputs, stride), depth in zip(_STAGES, depths, strict=True):
                outputs, stage = _round_channels(outputs * width), nn.ModuleList()
                for index in range(depth):
                    inner = channels * (expand_ratio if self.blocks else 1)
                    sizes = (inner, inner, kernel, 1 if index else stride, kernel // 2)
                    spatial = nn.Conv2d(*sizes, groups=max(inner // group_dim, 1), bias=False)
                    stage.append(_MBConv(channels, outputs, spatial, next(drops), new_norm))
                    channels = outputs
                self.blocks.append(stage)
            self.conv_head = nn.Conv2d(channels, head, 1, bias=False)
            self.bn2 = new_norm(head)
            self.dropout = nn.Dropout(dropout)
            self.classifier = nn.Linear(head, config.num_classes)
        materialize(self, device, seed, draw_weight)
        # Kept in a dict, so that its layers are not named a second time in the state.
        act = nn.SiLU(inplace=True)
        top = (self.conv_head, self.bn2, act, GlobalMean(), self.dropout, self.classifier)
        bottom = (self.conv_stem, self.bn1, act)
        self._ends = {"block0": nn.Sequential(*bottom), "Top": nn.Sequential(*top)}

    def stages(self) -> dict[str, nn.Module]:
        """Returns name -> module of the stages that `forward` calls, in order.

        The names are Graphcore's: `block0`, `block1a`, `block1b`, ... and `Top`. A block with a
        residual connection is one stage; without one, its expansion, spatial convolution and
        projection are three, such as `block6a`, `block6a/b` and `block6a/c` (two without an
        expansion). The modules are distinct and never change.
        """
        stages: dict[str, nn.Module] = {"block0": self._ends["block0"]}
        for number, blocks in enumerate(self.blocks, 1):
            for index, block in enumerate(blocks.children()):
                assert isinstance(block, _MBConv)
                stages |= block.stages(f"block{number}{chr(ord('a') + index)}")
        return stages | {"Top": self._ends["Top"]}


class _MBConv(nn.Module):
    """Expansion, spatial convolution, squeeze and excitation, projection; optionally residual."""

    def __init__(
        self, inputs: int, outputs: int, spatial: nn.Conv2d, drop: float, new_norm: NewNorm
    ) -> None:
        super().__init__()
        inner = spatial.in_channels
        self.residual = spatial.stride == (1, 1) and inputs == outputs
        projection, act = nn.Conv2d(inner, outputs, 1, bias=False), nn.SiLU(inplace=True)
        self._parts: dict[str, nn.Module] = {}  # views: the layers have timm's names
        if inner == inputs:
            self.conv_dw, self.bn1 = spatial, new_norm(inner)
            self.se = _SqueezeExcite(inner, max(1, inputs // 4))
            self.conv_pw, self.bn2 = projection, new_norm(outputs)
            self._parts["b"] = nn.Sequential(self.conv_dw, self.bn1, act, self.se)
            self._parts["c"] = nn.Sequential(self.conv_pw, self.bn2)
        else:
            self.conv_pw, self.bn1 = nn.Conv2d(inputs, inner, 1, bias=False), new_norm(inner)
            self.conv_dw, self.bn2 = spatial, new_norm(inner)
            self.se = _SqueezeExcite(inner, max(1, inputs // 4))
            self.conv_pwl, self.bn3 = projection, new_norm(outputs)
            self._parts["a"] = nn.Sequential(self.conv_pw, self.bn1, act)
            self._parts["b"] = nn.Sequential(self.conv_dw, self.bn2, act, self.se)
            self._parts["c"] = nn.Sequential(self.conv_pwl, self.bn3)
        self.drop_path = _DropPath(drop if self.residual else 0.0)

    def stages(self, name: str) -> dict[str, nn.Module]:
        """Returns stage name -> module: this block, or its parts without a residual connection."""
        if self.residual:
            return {name: self}
        return {name if k == "a" else f"{name}/{k}": part for k, part in self._parts.items()}

    def forward(self, images: Tensor) -> Tensor:
        out = images
        for part in self._parts.values():
            out = part(out)
        return images + self.drop_path(out) if self.residual else out


class _SqueezeExcite(nn.Module):
    """Scales each channel by a function of all channels' means (Hu et al., 2017)."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.conv_reduce = nn.Conv2d(channels, squeezed, 1)
        self.act = nn.SiLU(inplace=True)
        self.conv_expand = nn.Conv2d(squeezed, channels, 1)

    def forward(self, images: Tensor) -> Tensor:
        means = images.mean((2, 3), keepdim=True)
        return images * self.conv_expand(self.act(self.conv_reduce(means))).sigmoid()


class _DropPath(nn.Module):
    """In training, zeroes a sample with probability `drop`, and scales the others up."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.drop = drop

    def forward(self, images: Tensor) -> Tensor:
        if not self.training or not self.drop:
            return images
        keep = 1 - self.drop
        kept = torch.rand(len(images), 1, 1, 1, device=images.device) < keep
        return images * (kept / keep).to(images.dtype)


def _round_channels(channels: float) -> int:
    """Returns the closest multiple of 8, or the next one if that is below 90 %."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded
