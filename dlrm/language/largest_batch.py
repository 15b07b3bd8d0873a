"""Finds the largest micro-batch that a device has memory for."""

from collections.abc import Callable

import torch

MOST = 1 << 16


def largest_batch(compute: Callable[[int], object], most: int = MOST) -> int:
    """Returns the largest n, up to `most`, for which `compute(n)` does not run out of memory.

    Tries ascending powers of two, and bisects between the last two.
    """
    fits, size = 0, 1
    while size <= most and _fits(compute, size):
        fits, size = size, 2 * size
    too_many = min(size, most + 1)
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if _fits(compute, middle):
            fits = middle
        else:
            too_many = middle
    if not fits:
        raise ValueError("--batch_size max: not even one sample fits in the device's memory")
    return fits


def _fits(compute: Callable[[int], object], size: int) -> bool:
    try:
        compute(size)
    except torch.OutOfMemoryError:
        return False
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return True
