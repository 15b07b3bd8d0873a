"""Loads the compiled ops once, and reports their devices and whose products are faster on a CPU."""

import functools
import logging
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import dlrm.torch_settings  # noqa: F401  # all that computes loads it, so a fork may compute, too

_INSTRUCTION_SETS = ("generic", "avx2", "avx512", "avx512_bf16")  # in the order of csrc/cpu/isa.h
NATIVE, TORCH, AUTO = "native", "torch", "auto"
PRODUCTS = (NATIVE, TORCH)

# By the best of the processor's units. AVX512-BF16 and AVX2 are measured (benchmarks/RESULTS.md).
# The native operator does not use AMX; oneDNN does, for bfloat16.
_TABLE = {
    "amx_bf16": {"float32": NATIVE, "bfloat16": TORCH},
    "avx512_bf16": {"float32": NATIVE, "bfloat16": NATIVE},
    "avx512": {"float32": NATIVE, "bfloat16": NATIVE},
    "avx2": {"float32": NATIVE, "bfloat16": NATIVE},
    "generic": {},
    "none": {},
}


def native_available() -> bool:
    """Returns whether the compiled CPU ops are loaded; otherwise the plain-torch references run."""
    return "cpu" in _native_devices


def cuda_kernels_available() -> bool:
    """Returns whether the compiled CUDA ops are loaded; otherwise plain torch runs on a GPU."""
    return "cuda" in _native_devices


def why_not_cuda_kernels() -> str | None:
    """Returns the reason why the compiled CUDA ops are not loaded, or None if they are."""
    return _cuda_problem


def why_not_native() -> str | None:
    """Returns the reason why the compiled CPU ops are not loaded, or None if they are."""
    return _problem


def has_native(op: str, **tensors: torch.Tensor | None) -> bool:
    """Returns whether `op` has compiled kernels for the device of its tensors.

    Raises:
        RuntimeError: the tensors are on several devices; the message names each.
    """
    device, *others = {tensor.device for tensor in tensors.values() if tensor is not None}
    if others:
        given = ((name, tensor) for name, tensor in tensors.items() if tensor is not None)
        where = ", ".join(f"{name} on {tensor.device}" for name, tensor in given)
        raise RuntimeError(f"{op}: expected all tensors on one device, got {where}")
    if device.type == "cuda" and _cuda_problem is not None and not torch.compiler.is_compiling():
        _say_once_that_cuda_is_missing()
    return device.type in _native_devices


def is_native_on_cpu(*tensors: torch.Tensor) -> bool:
    """Returns whether a CPU kernel can be called directly; graphs and torch.func need dispatch."""
    if not native_available() or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    return not torch._C._are_functorch_transforms_active() and all(one.is_cpu for one in tensors)


def register_gradient(op: str, function: Callable[..., Any]) -> None:
    """Makes autograd call `function`, which applies a `torch.autograd.Function`, instead of `op`.

    The Function's forward pass calls the operator through `below_autograd`. `torch.library`'s own
    registration costs the host 7 us more per call (torch 2.13, Granite Rapids).
    """
    _gradients.impl(op, function, "Autograd")


def below_autograd(op: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Calls an operator's kernel from within its gradient."""
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args, **options)


def instruction_set(limit: str | None = None) -> str:
    """Returns the CPU kernels' instruction set: "generic", "avx2", "avx512" or "avx512_bf16".

    It is the best that this processor has, or `limit` if that is given and lower; the limit holds
    until the next call with one. Without the compiled ops it is "none".
    """
    if limit is not None and limit not in _INSTRUCTION_SETS:
        raise ValueError(f"instruction_set: expected one of {_INSTRUCTION_SETS}, got {limit!r}")
    if not native_available():
        return "none"
    index = -1 if limit is None else _INSTRUCTION_SETS.index(limit)
    return _INSTRUCTION_SETS[torch.ops.dlrm.cpu_isa(index)]


def choose_products(dtype: torch.dtype) -> str:
    """Returns whose matrix products MLPs of a dtype use on this processor: "native" or "torch".

    The choice follows a table by the processor's units; nothing is timed during a run.
    """
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


def follow_torch_settings() -> None:
    """Passes torch's settings to the CUDA kernels: TF32 in products, deterministic algorithms."""
    global _switches
    if torch.compiler.is_compiling() or not cuda_kernels_available():
        return
    switches = cuda_switches()
    if switches != _switches:
        torch.ops.dlrm.cuda_switches(switches)
        _switches = switches


def cuda_switches() -> int:
    """Returns torch's settings in the encoding of csrc/cuda/runtime.h."""
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return tf32 + 2 * torch.are_deterministic_algorithms_enabled()


def _load(path: Path) -> str | None:
    """Loads a file of compiled ops; returns the reason if that failed."""
    try:
        torch.ops.load_library(path)
    except OSError as error:  # not built, for another machine, or for a later torch
        return str(error) if path.exists() else f"{path} was not built{_remedy()}"
    return None


def _remedy() -> str:
    """Returns a hint on building the operators if the package is in its source folder."""
    source = _FOLDER.parent
    if not (source / "setup.py").is_file():
        return ""
    return (
        f"; `make venv` in {source} builds it, or `python setup.py build_ext --inplace` there. "
        "Python imports this folder because it is the current one or the package is installed "
        "from it"
    )


def _load_cuda() -> str | None:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return _problem or _load(_FOLDER / "_ops_cuda.so")


@functools.cache
def _say_once_that_cuda_is_missing() -> None:
    """Reports it at the first tensor on a GPU; nothing asks earlier whether there is a GPU."""
    _say("native CUDA", str(_cuda_problem))


def _say(missing: str, problem: str) -> None:
    logging.getLogger(__name__).warning(
        "plain-torch references run instead of the %s ops of dlrm: %s", missing, problem
    )


# Sparse gradients are made without checks on purpose.
warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")

_FOLDER = Path(__file__).resolve().parent.parent
_gradients = torch.library.Library("dlrm", "IMPL")
_switches = 0
_problem = _load(_FOLDER / "_ops_cpu.so")
_cuda_problem = _load_cuda()
if _problem is not None:
    _say("native", _problem)
_native_devices = frozenset(
    name for name, problem in (("cpu", _problem), ("cuda", _cuda_problem)) if problem is None
)
