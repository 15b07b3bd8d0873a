"""float32 values stored as two 16-bit halves: a bfloat16 to compute with, and the remaining bits.

Reading a bfloat16 table halves the traffic. With the lower halves in a second tensor, an optimizer
updates it as exactly as a float32 table, in the same memory.
"""

import torch
from torch import Tensor

_QUIET_NAN = 0x7FC00000


def split_float32(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `(high, low)`, from which `join_float32` makes the same values.

    `high` is the value rounded to the nearest bfloat16, halfway cases away from zero: on the bits,
    `(bits + 0x8000) >> 16`. `low` is the rest, `bits - (high << 16)`, as int16. A value nearer to
    the next power of two than to the greatest bfloat16 has an infinite `high`, and is still joined
    exactly. The payload of a NaN is lost.

    Args:
        values: float32, of any shape.
    """
    if values.dtype != torch.float32:
        raise ValueError(f"split_float32: expected float32 values, got {values.dtype}")
    bits = values.detach().view(torch.int32).masked_fill(values.isnan(), _QUIET_NAN)
    low = bits.to(torch.int16)  # the lower 16 bits
    high = (bits - low.to(torch.int32)) >> 16
    return high.to(torch.int16).view(torch.bfloat16), low


def join_float32(high: Tensor, low: Tensor) -> Tensor:
    """Returns the float32 values that `split_float32` split, bit for bit.

    Args:
        high: bfloat16.
        low: int16, of the same shape.
    """
    if high.dtype != torch.bfloat16 or low.dtype != torch.int16 or high.shape != low.shape:
        raise ValueError(
            "join_float32: expected bfloat16 high and int16 low of one shape, got "
            f"{list(high.shape)} {high.dtype} and {list(low.shape)} {low.dtype}"
        )
    bits = (high.detach().view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)
    return bits.view(torch.float32)
