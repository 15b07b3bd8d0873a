"""Checks of GPUs: the one that a run would use, and obstacles to its use."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from dlrm.scripts.doctor.checks import ABSENT, BROKEN, NOTE, OK, SLOW, Result
from dlrm.scripts.doctor.machine import GIB
from dlrm.scripts.doctor.packages import pip_install, rebuild

LEAST_FREE = 4 * GIB
DRIVERS = {11: 450, 12: 525, 13: 580}  # the first driver for each major version of CUDA


def cuda() -> Iterator[Result]:
    """GPUs, the driver, and the CUDA operators."""
    import torch

    if torch.cuda.is_available():
        yield from _devices()
    else:
        yield _no_device()
    yield from _driver()
    if torch.cuda.is_available() or torch.version.cuda:
        yield _nvcc()
    yield _operators()


def _devices() -> Iterator[Result]:
    import torch

    indices = range(torch.cuda.device_count())
    names = [
        f"{torch.cuda.get_device_name(i)} (compute capability {_dotted(_capability(i))})"
        for i in indices
    ]
    yield Result("CUDA devices", OK, f"{', '.join(names)}; torch is {_built()}")
    for i in indices:
        free, total = torch.cuda.mem_get_info(i)
        value = f"{free / GIB:.1f} GiB free of {total / GIB:.1f} on cuda:{i}"
        if free >= LEAST_FREE:
            yield Result("GPU memory", OK, value)
            continue
        cost = "tables and batches above that do not fit: 26 tables of 100,000 rows of 128 floats "
        cost += "take 1.3 GiB"
        fix = "nvidia-smi    # names the programs that hold the memory"
        if total < LEAST_FREE:  # ending other programs would not help
            fix = "use --base_device=cpu, --embedding_dtype=bf16 or a smaller --batch_size"
        yield Result("GPU memory", NOTE, value, cost, fix)


def _no_device() -> Result:
    import torch

    if not (Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi")):
        value = f"no NVIDIA GPU or driver; torch is {_built()}"
        return Result("CUDA devices", ABSENT, value, "training runs on the CPU")
    return Result(
        "CUDA devices",
        ABSENT,
        f"there is an NVIDIA driver, but torch, {_built()}, finds no device",
        "training runs on the CPU",
        "" if torch.version.cuda else f"{pip_install()} --force-reinstall torch",
    )


def _driver() -> Iterator[Result]:
    """Reports the CUDA version that the driver supports, and the one that torch was built for."""
    import torch

    version = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
    if not version or not torch.version.cuda:
        return
    supported, wanted = (version // 1000, version % 1000 // 10), _numbers(torch.version.cuda)
    value = f"supports CUDA {_dotted(supported)}; torch is {_built()}"
    newer = f"install driver {DRIVERS.get(wanted[0], 'of this CUDA')} or newer"
    if supported[0] < wanted[0]:
        cost = "torch cannot use the GPU: training runs on the CPU"
        fix = f"{newer}, or a torch that is built for CUDA {supported[0]}"
        yield Result("CUDA driver", SLOW, value, cost, fix)
    elif supported < wanted:
        cost = "kernels run only where their machine code is for this GPU: PTX does not compile"
        yield Result("CUDA driver", NOTE, value, cost, newer)
    else:
        yield Result("CUDA driver", OK, value)


def _nvcc() -> Result:
    import torch

    home = os.environ.get("CUDA_HOME")
    found = shutil.which(str(Path(home, "bin", "nvcc")) if home else "nvcc")
    if found:
        return Result("nvcc", OK, found)
    return Result(
        "nvcc",
        ABSENT,
        "not found" + (f" in CUDA_HOME, {home}" if home else " on the path"),
        "the CUDA operators cannot be compiled here",
        f"install NVIDIA's CUDA toolkit {torch.version.cuda or ''}, or set CUDA_HOME to its folder",
    )


def _operators() -> Result:
    """Reports if the CUDA operators are loaded and have code for every GPU."""
    import torch

    from dlrm.ops.library import cuda_architectures, why_not_cuda_kernels

    available = torch.cuda.is_available()
    reason = why_not_cuda_kernels()
    if reason is not None:
        return Result(
            "CUDA operators",
            SLOW if available else ABSENT,
            f"not loaded: {reason}",
            "on a GPU plain-torch operators run: the same results, without the fused kernels"
            + ("" if available else "; here, without a GPU, nothing"),
            _rebuild() if available else "",
        )
    compiled = cuda_architectures()
    value = f"loaded, compiled for {', '.join(compiled) or 'unknown architectures'}"
    if not available:
        return Result("CUDA operators", OK, f"{value}; there is no GPU")
    codes = {i: code_for(_capability(i), compiled) for i in range(torch.cuda.device_count())}
    lacking = [i for i, code in codes.items() if code is None]
    if compiled and lacking:
        capability = _dotted(_capability(lacking[0]))
        value += f", which cuda:{lacking[0]} of compute capability {capability} cannot run"
        return Result("CUDA operators", BROKEN, value, "every operator fails there", _rebuild())
    used = ", ".join(f"cuda:{i} runs {code}" for i, code in codes.items() if code)
    return Result("CUDA operators", OK, f"{value}; {used}" if used else value)


def code_for(capability: tuple[int, int], compiled: tuple[str, ...]) -> str | None:
    """Returns the code that a GPU would run of a library for architectures such as ("80", "90").

    Machine code runs on GPUs of its major version and the same or a greater minor version. PTX,
    which the library has for the last architecture, runs on that one and all later ones. "a" and
    "f" after the number tie code to its own architecture, or to its family.
    """
    parsed = [(int(name.rstrip("af")[:-1]), int(name.rstrip("af")[-1]), name) for name in compiled]
    fitting = [
        (minor, name)
        for major, minor, name in parsed
        if major == capability[0]
        and (minor == capability[1] if name[-1] == "a" else minor <= capability[1])
    ]
    if fitting:
        return f"machine code for {max(fitting)[1]}"
    if parsed and parsed[-1][2].isdigit() and parsed[-1][:2] <= capability:
        return f"PTX of {parsed[-1][2]}, which the driver compiles when it is first used"
    return None


def _rebuild() -> str:
    import torch

    archs = {"".join(map(str, _capability(i))) for i in range(torch.cuda.device_count())}
    chosen = f'DLRM_CUDA_ARCHS="{";".join(sorted(archs, key=int))}"'
    return f"DLRM_CUDA=1 {chosen} {rebuild()}    # needs nvcc"


def _capability(index: int) -> tuple[int, int]:
    import torch

    return torch.cuda.get_device_capability(index)


def _built() -> str:
    import torch

    return f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs only"


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _numbers(version: str) -> tuple[int, int]:
    major, minor, *_ = (*version.split("."), "0")
    return int(major), int(minor)
