"""torch's settings of a process: threads after a fork, and those of a caller, set aside."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

_MAPS = Path("/proc/self/maps")
_PAUSE_HARD = 2  # omp_pause_hard of omp.h


def _end_openmp_threads() -> None:
    """Ends this thread's pool of OpenMP before a fork; both processes start a new one when needed.

    A child inherits the pool of GNU's OpenMP without its threads, and would wait for them forever.
    """
    for library in sorted({line.split(maxsplit=5)[-1] for line in _MAPS.read_bytes().splitlines()}):
        if os.path.basename(library).startswith(b"libgomp"):
            pause = getattr(ctypes.CDLL(os.fsdecode(library)), "omp_pause_resource_all", None)
            if pause is not None:  # scikit-learn brings an older one, with a pool of its own
                pause(_PAUSE_HARD)


if _MAPS.exists():
    os.register_at_fork(before=_end_openmp_threads)


@contextmanager
def own_settings(tf32: bool | None = None) -> Iterator[None]:
    """Sets aside what a caller has chosen for torch, within the block.

    That is `torch.set_default_dtype`, `torch.set_default_device` or `with torch.device(...)`,
    `torch.no_grad`, `torch.inference_mode` and `torch.autocast`. The default dtype holds for all
    threads and is touched only if it is not float32.

    Args:
        tf32: allow TensorFloat-32 in float32 matrix products on CUDA; None leaves torch's setting.
    """
    dtype, matmul = torch.get_default_dtype(), torch.backends.cuda.matmul
    with ExitStack() as at_the_end:
        if dtype != torch.float32:
            torch.set_default_dtype(torch.float32)
            at_the_end.callback(torch.set_default_dtype, dtype)
        if torch.get_default_device().type != "cpu":
            at_the_end.enter_context(torch.device("cpu"))
        if torch.is_inference_mode_enabled():
            at_the_end.enter_context(torch.inference_mode(False))
        at_the_end.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                at_the_end.enter_context(torch.autocast(device, enabled=False))
        if tf32 is not None:
            at_the_end.callback(setattr, matmul, "fp32_precision", matmul.fp32_precision)
            matmul.fp32_precision = "tf32" if tf32 else "ieee"
        yield
