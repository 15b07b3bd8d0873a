"""Dropout that draws 16 random bits per element; torch draws 64."""

import torch
import torch.nn.functional as F
from torch import Tensor

_STEPS = 1 << 16


def dropout(values: Tensor, share: float) -> Tensor:
    """Sets elements to 0, each with probability `share`, and scales the others up accordingly.

    On the CPU, except under torch.compile, the probability is rounded to a multiple of 2**-16; this
    is 2.5 times as fast (1024 x 768, Zen 4) as torch.nn.functional.dropout, which runs elsewhere.
    Random numbers come from torch's default generator.

    Args:
        values: of any shape and floating dtype.
        share: in [0, 1).
    """
    dropped = round(share * _STEPS)
    compiled = torch.compiler.is_compiling()
    if dropped in (0, _STEPS) or values.device.type != "cpu" or compiled:
        return F.dropout(values, share)
    count = values.numel()
    bits = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)
    kept = _parts(bits)[:count] >= dropped - _STEPS // 2
    noise = kept.to(values.dtype).mul_(_STEPS / (_STEPS - dropped))
    return values * noise.view(values.shape)


def _parts(bits: Tensor) -> Tensor:
    """Returns the four int16 of each int64; a trace cannot record that view."""
    if not torch.jit.is_tracing():
        return bits.view(torch.int16)
    parts = bits[:, None] >> torch.tensor([0, 16, 32, 48]) & _STEPS - 1
    return (parts - _STEPS * (parts >= _STEPS // 2)).flatten()
