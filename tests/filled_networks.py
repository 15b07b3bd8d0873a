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
        [
            -0.968531961,
            1.198078855,
            -3.372666938,
            -0.486179695,
            1.088338541,
            0.46046589,
            -1.393619775,
        ],
    ),
    "resnet50 group": (
        ResNet,
        {"norm": "group", "groups": 32},
        [
            -0.177948801,
            0.543095164,
            -0.719893858,
            -0.088054909,
            -1.08504211,
            1.555878602,
            -0.769206436,
        ],
    ),
    "resnext101_32x4d": (
        ResNet,
        {},
        [
            0.041197664,
            -0.164709207,
            0.656556937,
            0.664519787,
            1.426613033,
            0.578191738,
            -0.862743689,
        ],
    ),
    "efficientnet_b0": (
        EfficientNet,
        {**STILL, "norm_eps": PEERS_NORM_EPS},
        [
            -0.671147407,
            0.008931125,
            0.275656379,
            -0.517189719,
            -0.250431112,
            0.017583064,
            0.180061755,
        ],
    ),
    "efficientnet_b4": (
        EfficientNet,
        {**STILL, "norm_eps": PEERS_NORM_EPS},
        [
            -0.34625405,
            0.074765246,
            -0.424237847,
            -0.161392898,
            -0.174900149,
            0.252423259,
            -0.023900763,
        ],
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
