"""Choice of the matrix products of an MLP on a CPU: the native operator's, or torch's with oneDNN.

The choice follows a table by the processor's units and dtype. Nothing is timed during a run.
"""

import functools
import re
from pathlib import Path

import torch

from dlrm.ops.library import instruction_set

NATIVE, TORCH, AUTO = "native", "torch", "auto"
PRODUCTS = (NATIVE, TORCH)

# By the best of the processor's units. AVX512-BF16 and AVX2 are measured (benchmarks/RESULTS.md);
# `doctor --tune` measures any. The native operator does not use AMX; oneDNN does, for bfloat16.
_TABLE = {
    "amx_bf16": {"float32": NATIVE, "bfloat16": TORCH},
    "avx512_bf16": {"float32": NATIVE, "bfloat16": NATIVE},
    "avx512": {"float32": NATIVE, "bfloat16": NATIVE},
    "avx2": {"float32": NATIVE, "bfloat16": NATIVE},
    "generic": {},
    "none": {},
}


def choose_products(dtype: torch.dtype) -> str:
    """Returns "native" or "torch" for MLPs that compute in a dtype on this processor."""
    units = instruction_set()
    if units == "avx512_bf16" and _has_amx():
        units = "amx_bf16"
    return _TABLE[units].get(str(dtype).removeprefix("torch."), TORCH)


@functools.cache
def _has_amx() -> bool:
    try:
        found = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return re.search(r"^flags\s*:.*\bamx_bf16\b", found, re.M) is not None
