"""Initial weights that depend only on a seed and a name."""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


def generator(seed: int, name: str) -> torch.Generator:
    """Returns a CPU generator whose stream is fixed by `seed` and `name`.

    A parameter's initial value is therefore independent of the other parameters, of the order in
    which they are made, and of the process.
    """
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)


def fill_normal(values: Tensor, std: float, random: torch.Generator) -> Tensor:
    """Fills a tensor from N(0, std), in place, and returns it.

    On the meta device nothing is done: torch would import its compiler, which takes seconds.
    """
    return values if values.is_meta else values.normal_(0, std, generator=random)


def materialize(
    network: nn.Module,
    device: torch.device,
    seed: int,
    draw: Callable[[nn.Module, Tensor, torch.Generator], object],
) -> None:
    """Allocates a network that was built on the meta device, and initializes its weights.

    Norms get weight 1 and bias 0, every other parameter named "weight" is drawn, and all else is 0.
    On the meta device nothing is done.

    Args:
        draw: fills a tensor with the weight of a module, from a generator of its own.
    """
    if device.type == "meta":
        return
    network.to_empty(device=device)
    with torch.no_grad():
        for name, module in network.named_modules():
            if isinstance(module, _NORMS):
                module.reset_parameters()
                continue
            for key, parameter in module.named_parameters(recurse=False):
                if key != "weight":
                    parameter.zero_()
                    continue
                values = torch.empty(parameter.shape, device="cpu")
                draw(module, values, generator(seed, f"{name}.weight"))
                parameter.copy_(values)
