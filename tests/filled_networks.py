"""Networks with weights from a formula, and their logits: the golden values.

`tests/peers` shows that the networks of torchvision and timm give the same logits.
"""

import torch
from torch import Tensor, nn

from dlrm.vision.config import NetworkConfig

PIXELS, CLASSES = 64, 7
PEERS_NORM_EPS = 1e-5  # batch norm epsilon of torchvision and timm
STILL = {"dropout": 0.0, "drop_path": 0.0}
TIMMS = {**STILL, "norm_eps": PEERS_NORM_EPS}

# Each network, and the logits of the second of two images in training mode.
GOLDEN = {
    "resnet50": ({}, [-0.9685, 1.1981, -3.3727, -0.4862, 1.0883, 0.4605, -1.3936]),
    "resnet50 group": (
        {"norm": "group", "groups": 32},
        [-0.1779, 0.5431, -0.7199, -0.0881, -1.0850, 1.5559, -0.7692],
    ),
    "resnext101_32x4d": ({}, [0.0412, -0.1647, 0.6566, 0.6645, 1.4266, 0.5782, -0.8627]),
    "efficientnet_b0": (
        TIMMS,
        [-0.6711, 0.0089, 0.2757, -0.5172, -0.2504, 0.0176, 0.1801],
    ),
    "efficientnet_b4": (
        TIMMS,
        [-0.3463, 0.0748, -0.4242, -0.1614, -0.1749, 0.2524, -0.0239],
    ),
    "efficientnet_b4 group": (
        {**STILL, "norm": "group", "group_dim": 16, "expand_ratio": 4},
        [0.5402, 0.3770, 0.5491, 0.6756, 1.1163, 0.1935, 0.4822],
    ),
}


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Returns a network of `GOLDEN` with the weights of `fill`, in training mode."""
    options, _ = GOLDEN[name]
    with torch.device("meta"):
        network = NetworkConfig(name.split()[0], num_classes=CLASSES, **options).build()
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
