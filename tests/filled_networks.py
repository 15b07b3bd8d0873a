"""Networks with weights from a formula, and their logits: the golden values.

`tests/peers` shows that the networks of torchvision and timm give the same logits.
"""

import torch
from torch import Tensor, nn

from dlrm.vision.efficientnet import EfficientNet
from dlrm.vision.resnet import ResNet

PIXELS, CLASSES = 64, 7
PEERS_NORM_EPS = 1e-5  # batch norm epsilon of torchvision and timm
STILL = {"dropout": 0.0, "drop_path": 0.0}

# Each network, and the logits of the second of two images in training mode.
GOLDEN = {
    "resnet50": (
        ResNet,
        {},
        [-0.968532, 1.198079, -3.372667, -0.486180, 1.088339, 0.460466, -1.393620],
    ),
    "resnet50 group": (
        ResNet,
        {"norm": "group", "groups": 32},
        [-0.177949, 0.543095, -0.719894, -0.088055, -1.085042, 1.555879, -0.769206],
    ),
    "resnext101_32x4d": (
        ResNet,
        {},
        [0.041198, -0.164709, 0.656557, 0.664520, 1.426613, 0.578192, -0.862744],
    ),
    "efficientnet_b0": (
        EfficientNet,
        {**STILL, "norm_eps": PEERS_NORM_EPS},
        [-0.671147, 0.008931, 0.275656, -0.517190, -0.250431, 0.017583, 0.180062],
    ),
    "efficientnet_b4": (
        EfficientNet,
        {**STILL, "norm_eps": PEERS_NORM_EPS},
        [-0.346254, 0.074765, -0.424238, -0.161393, -0.174900, 0.252423, -0.023901],
    ),
    "efficientnet_b4 group": (
        EfficientNet,
        {**STILL, "norm": "group", "group_dim": 16, "expand_ratio": 4},
        [0.54016255, 0.377014759, 0.549073362, 0.675573646, 1.116265994, 0.193484988, 0.482189804],
    ),
}


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Returns a network of `GOLDEN` with the weights of `fill`, in training mode."""
    kind, options, _ = GOLDEN[name]
    with torch.device("meta"):
        network = kind(name.split()[0], num_classes=CLASSES, **options)
    return fill(network.to_empty(device="cpu").to(dtype))


def images(rows: int = 2, pixels: int = PIXELS, dtype: torch.dtype = torch.float64) -> Tensor:
    """Returns noise images."""
    return _spread(rows * 3 * pixels * pixels, 0).view(rows, 3, pixels, pixels).to(dtype)


def fill(network: nn.Module) -> nn.Module:
    """Sets the state of a network to values that depend only on shape and position."""
    with torch.no_grad():
        for index, (name, tensor) in enumerate(network.state_dict().items()):
            if not tensor.is_floating_point():
                continue
            values = _spread(tensor.numel(), index).view(tensor.shape)
            if tensor.dim() > 1:  # a weight: keeps outputs as large as inputs
                tensor.copy_(values * (3 / tensor[0].numel()) ** 0.5)
            elif name.endswith(("weight", "var")):
                tensor.copy_(1 + 0.1 * values)
            else:
                tensor.copy_(0.1 * values)
    return network


def _spread(count: int, start: int) -> Tensor:
    """Returns irregular numbers in [-1, 1), equal on any machine."""
    bits = (torch.arange(count) * 2654435761 + (start + 1) * 2246822519) % 2**32
    bits = (bits ^ bits >> 15) * 1103515245 % 2**32
    return (bits ^ bits >> 13).double() * 2.0**-31 - 1
