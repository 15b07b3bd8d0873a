"""ResNet-50 and ResNeXt-101 32x4d for images, as named stages.

Parameters have the names of torchvision's models, so that checkpoints of torchvision, timm and
NVIDIA load unchanged.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlrm.model.layers.initialize import materialize
from dlrm.vision.blocks import GlobalMean, NewNorm, StagedNetwork, draw_weight, norm_layers

if TYPE_CHECKING:
    from dlrm.vision.config import NetworkConfig


class _Variant(NamedTuple):
    depths: tuple[int, ...]
    cardinality: int
    group_width: int


VARIANTS = {
    "resnet50": _Variant((3, 4, 6, 3), 1, 64),
    "resnext101_32x4d": _Variant((3, 4, 23, 3), 32, 4),
}


class ResNet(StagedNetwork):
    """ResNet (He et al., 2015) in version 1.5, stride on the 3x3, and ResNeXt (Xie et al., 2016).

    `zero_init_residual` initializes the last norm of each block with 0, so that each block starts
    as the identity.
    """

    def __init__(self, config: "NetworkConfig", seed: int = 0) -> None:
        super().__init__()
        published, cardinality, group_width = VARIANTS[config.model]
        new_norm = norm_layers(config, groups=32, eps=1e-5)
        device, channels = torch.get_default_device(), 64
        with torch.device("meta"):
            self.conv1 = nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False)
            self.bn1 = new_norm(channels)
            self.relu = nn.ReLU(inplace=True)
            self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
            for stage, depth in enumerate(config.depths or published):
                inner, outputs = group_width * cardinality * 2**stage, 256 * 2**stage
                blocks = nn.ModuleList()
                for index in range(depth):
                    stride = 2 if stage and not index else 1
                    sizes = (channels, inner, outputs, stride, cardinality)
                    blocks.append(_Bottleneck(*sizes, new_norm))
                    channels = outputs
                self.add_module(f"layer{stage + 1}", blocks)
            self.avgpool = GlobalMean()
            self.fc = nn.Linear(channels, config.num_classes)
        materialize(self, device, seed, draw_weight)
        if config.zero_init_residual:
            for name, weight in self.named_parameters():
                if name.endswith("bn3.weight"):
                    nn.init.zeros_(weight)
        # Kept in a tuple, so that its layers are not named a second time in the state.
        self._stem = (nn.Sequential(self.conv1, self.bn1, self.relu, self.maxpool),)

    def stages(self) -> dict[str, nn.Module]:
        """Returns name -> module of the stages that `forward` calls, in order.

        The names are Graphcore's: `b0`; for block i of stage s `b<s>/<i>`, up to its sum, and
        `b<s>/<i>/relu`; `reduce_mean`; `fc1`. The modules are distinct and never change.
        """
        stages: dict[str, nn.Module] = {"b0": self._stem[0]}
        for stage in range(1, 5):
            for index, block in enumerate(self.get_submodule(f"layer{stage}").children()):
                stages[f"b{stage}/{index}"] = block
                stages[f"b{stage}/{index}/relu"] = block.get_submodule("relu")
        return stages | {"reduce_mean": self.avgpool, "fc1": self.fc}


class _Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside an identity or a projection, without the last ReLU."""

    def __init__(
        self, inputs: int, inner: int, outputs: int, stride: int, groups: int, new_norm: NewNorm
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, inner, 1, bias=False)
        self.bn1 = new_norm(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, groups=groups, bias=False)
        self.bn2 = new_norm(inner)
        self.conv3 = nn.Conv2d(inner, outputs, 1, bias=False)
        self.bn3 = new_norm(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, new_norm(outputs))
        self.relu = nn.ReLU(inplace=True)  # nothing else reads its input

    def forward(self, images: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(images)), inplace=True)
        out = F.relu(self.bn2(self.conv2(out)), inplace=True)
        out = self.bn3(self.conv3(out))
        out += images if self.downsample is None else self.downsample(images)
        return out
