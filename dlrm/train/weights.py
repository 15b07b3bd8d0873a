"""Loads weights that others trained into a network with the same names."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn


def load_weights(model: nn.Module, path: str, heads: tuple[str, ...] = ()) -> None:
    """Loads weights with the names of the model's; a file of torch is read without code.

    Args:
        model: what to load into.
        path: `.safetensors`, or a file of torch, maybe with all in "state_dict" or "model".
        heads: beginnings of names that may be missing or of another shape; such stay as they are.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not of this architecture; the names are given.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file (--init_checkpoint)")
    if path.endswith(".safetensors"):
        weights: Any = load_file(path)
    else:
        try:
            weights = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"{path}: no file of weights alone: {reason}") from error
    for key in ("state_dict", "model"):  # how training scripts wrap them
        if isinstance(weights, dict) and isinstance(weights.get(key), dict):
            weights = weights[key]
    weights = {name.removeprefix("module."): value for name, value in weights.items()}
    own = model.state_dict()
    counters = {name for name in own if name.endswith("num_batches_tracked")}
    wrong = sorted((own.keys() - counters) ^ (weights.keys() - counters))
    wrong += [n for n, v in own.items() if n in weights and v.shape != weights[n].shape]
    wrong = [name for name in wrong if not (heads and name.startswith(heads))]
    if wrong:
        raise ValueError(f"{path}: of another architecture; differing: {', '.join(wrong[:8])}")
    with torch.no_grad():
        for name, value in own.items():
            if name in weights and weights[name].shape == value.shape:
                value.copy_(weights[name])
