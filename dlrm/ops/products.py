"""Choice of the matrix products of an MLP on a CPU: the native operator's, or torch's with oneDNN.

The choice follows a table by processor, dtype and layers: first the user's, which
`python -m dlrm.scripts.doctor --tune` writes, then the package's. Nothing is timed during a run.
"""

import functools
import json
import platform
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from dlrm.files import write_atomically
from dlrm.ops.library import instruction_set

NATIVE, TORCH, AUTO = "native", "torch", "auto"
PRODUCTS = (NATIVE, TORCH)

# By the best of the processor's units. AVX512-BF16 and AVX2 are measured (benchmarks/RESULTS.md);
# `--tune` measures the others. The native operator does not use AMX; oneDNN does, for bfloat16.
_TABLE = {
    "amx_bf16": {"float32": NATIVE, "bfloat16": TORCH},
    "avx512_bf16": {"float32": NATIVE, "bfloat16": NATIVE},
    "avx512": {"float32": NATIVE, "bfloat16": NATIVE},
    "avx2": {"float32": NATIVE, "bfloat16": NATIVE},
    "generic": {},
    "none": {},
}


def choose_products(dtype: torch.dtype, layers: Sequence[int] = ()) -> str:
    """Returns "native" or "torch" for an MLP on this processor.

    Args:
        dtype: dtype that the MLP computes in.
        layers: its number of inputs and the outputs of each layer.

    Raises:
        ValueError: the user's table cannot be read; the message names the file.
    """
    name, units = str(dtype).removeprefix("torch."), instruction_set()
    if units == "avx512_bf16" and "amx_bf16" in _flags():
        units = "amx_bf16"
    shipped = _TABLE[units].get(name, TORCH)
    if not _TABLE[units]:
        return shipped
    return user_table().get(processor(), {}).get(name, {}).get(layers_key(layers), shipped)


def layers_key(layers: Sequence[int]) -> str:
    """Returns the layers as the tables write them, such as "13-512-256"."""
    return "-".join(map(str, layers))


def processor() -> str:
    """Returns vendor, family and model of the processor, or the architecture alone."""
    found = [re.search(rf"^{name}\s*:\s*(\S+)$", _cpuinfo(), re.M) for name in _NAMES]
    return " ".join(one[1] for one in found if one) or platform.machine()


def user_table_path() -> Path:
    """Returns the file of the user's table."""
    return Path("~/.config/dlrm/products.json").expanduser()


def user_table() -> dict[str, dict[str, dict[str, str]]]:
    """Returns the user's table; empty if there is none.

    Raises:
        ValueError: it cannot be read; the message names the file.
    """
    try:
        path = user_table_path()
        text = path.read_text()
    except (OSError, RuntimeError):  # no file, or no home
        return {}
    try:
        table = json.loads(text)
        values = [v for owner in table.values() for one in owner.values() for v in one.values()]
    except (ValueError, AttributeError):
        values = [None]
    if not {*values} <= {*PRODUCTS}:
        raise ValueError(
            f"{path}: expected processor -> dtype -> layers -> one of {PRODUCTS}; delete the file, "
            "or write it again by python -m dlrm.scripts.doctor --tune"
        )
    return table


def set_damaged_table_aside() -> Path | None:
    """Renames the user's table if it cannot be read; returns its new place, or None."""
    try:
        user_table()
    except ValueError:
        return user_table_path().replace(user_table_path().with_suffix(".json.damaged"))
    return None


def add_to_user_table(dtype: torch.dtype, layers: Sequence[int], products: str) -> None:
    """Enters a choice for this processor; the file is replaced as a whole."""
    table = user_table()
    of_dtype = table.setdefault(processor(), {}).setdefault(str(dtype).removeprefix("torch."), {})
    of_dtype[layers_key(layers)] = products
    path = user_table_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(table, indent=2) + "\n")


_NAMES = ("vendor_id", "cpu family", "model")


@functools.cache
def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return ""


def _flags() -> set[str]:
    found = re.search(r"^flags\s*:(.*)$", _cpuinfo(), re.M)
    return set(found[1].split()) if found else set()
