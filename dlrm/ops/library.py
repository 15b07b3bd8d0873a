"""Loads the compiled ops, once, and knows which devices they have kernels for."""

import logging
from pathlib import Path

import torch

_INSTRUCTION_SETS = ("generic", "avx2", "avx512", "avx512_bf16")  # in the order of csrc/cpu/isa.h


def native_available() -> bool:
    """Whether the compiled CPU ops are loaded; else the plain-torch references run."""
    return "cpu" in _native_devices


def why_not_native() -> str | None:
    """Why the compiled CPU ops are not loaded; None where they are."""
    return _problem


def has_native(op: str, **tensors: torch.Tensor | None) -> bool:
    """Whether `op` has compiled kernels for the device that its tensors are on.

    Raises:
        RuntimeError: they are on several; each is named.
    """
    given = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    device, *others = given.values()
    if any(other != device for other in others):
        where = ", ".join(f"{name} on {device}" for name, device in given.items())
        raise RuntimeError(f"{op}: expected all tensors on one device, got {where}")
    return device.type in _native_devices


def instruction_set(limit: str | None = None) -> str:
    """The instruction set that the CPU kernels use: "generic", "avx2", "avx512" or "avx512_bf16".

    It is the best that this processor has, or `limit` where that is given and less; the limit holds
    until the next. Without the compiled ops it is "none".
    """
    if limit is not None and limit not in _INSTRUCTION_SETS:
        raise ValueError(f"instruction_set: expected one of {_INSTRUCTION_SETS}, got {limit!r}")
    if not native_available():
        return "none"
    index = -1 if limit is None else _INSTRUCTION_SETS.index(limit)
    return _INSTRUCTION_SETS[torch.ops.dlrm.cpu_isa(index)]


def _load(path: Path) -> str | None:
    """Loads a file of compiled ops; returns why it could not, if so."""
    try:
        torch.ops.load_library(path)
    except OSError as error:  # not built, for another machine, or for a later torch
        reason = str(error) if path.exists() else f"{path} was not built"
        logging.getLogger(__name__).warning(
            "dlrm.ops: plain-torch references run instead of the native ops: %s", reason
        )
        return reason
    return None


_problem = _load(Path(__file__).resolve().parent.parent / "_ops_cpu.so")
_native_devices = frozenset(["cpu"] if _problem is None else [])
