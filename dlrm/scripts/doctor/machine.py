"""Checks of the machine: cores and threads, memory pages, free memory and disk space."""

import os
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from dlrm import environment
from dlrm.host_cores import available_cores, idle_cores
from dlrm.host_memory import host_memory, read
from dlrm.scripts.doctor.checks import NOTE, OK, SLOW, Result

GIB = 2**30


def threads() -> Iterator[Result]:
    """Reports the cores that this process may use, and torch's threads."""
    import torch

    cores, why = available_cores()
    count, idle = torch.get_num_threads(), idle_cores()
    chosen = os.environ.get("OMP_NUM_THREADS")
    value = f"torch uses {count}; {cores:g} cores are available ({why}); OMP_NUM_THREADS "
    value += f"is {chosen}" if chosen else "is not set"
    whole = max(1, int(cores))
    fix = f"export OMP_NUM_THREADS={whole}"
    if count > max(cores, 1):
        cost = "threads wait for each other's turn on a core: steps can take many times as long"
        yield Result("threads", SLOW, value, cost, fix)
    elif count < whole and (idle is None or idle > count):
        cores_unused = "1 core is" if whole - count == 1 else f"{whole - count} cores are"
        yield Result("threads", SLOW, value, f"{cores_unused} left unused", fix)
    else:
        yield Result("threads", OK, value)
    spins = os.environ.get("GOMP_SPINCOUNT")
    if spins:
        yield Result("waiting threads", OK, f"spin {spins} times, then sleep (GOMP_SPINCOUNT)")
    else:
        yield Result(
            "waiting threads",
            NOTE,
            "spin as OpenMP's default says: the commands' own setting is off (DLRM_TUNE=0)",
            "much time where other programs want the cores",
            "unset DLRM_TUNE",
        )
    if idle is not None and idle < cores - 0.5:
        cost = "training gets a part of the cores only, and figures of benchmarks mean little"
        small = ". A small model, whose steps take milliseconds, trains no slower on one thread"
        yield Result(
            "load",
            NOTE,
            f"other programs leave {idle:.1f} of {os.cpu_count()} cores idle",
            cost + (small if count > 1 else ""),
            "for a small model, export OMP_NUM_THREADS=1" if count > 1 else "",
        )


def memory_set_up() -> Iterator[Result]:
    """Reports huge pages, and whether freed memory is kept."""
    import torch

    kernel = read("/sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", kernel)
    mode = chosen.group(1) if chosen else "unknown"
    setting = os.environ.get("THP_MEM_ALLOC_ENABLE", "not set")
    megabytes = 64
    first = _faults_of_touching(torch, megabytes << 20)
    # A small block may have taken the start of the freed one, so one try is not enough.
    again = min(_faults_of_touching(torch, megabytes << 20) for _ in range(5))
    value = (
        f"kernel: {mode}; THP_MEM_ALLOC_ENABLE {setting}; touching {megabytes} MB takes {first} "
        f"page faults (about {megabytes << 20 >> 21} with huge pages, "
        f"{(megabytes << 20) // resource.getpagesize()} without)"
    )
    cost = "up to a fifth of the time of a training step, where fresh memory is touched"
    if first <= (megabytes << 20) // resource.getpagesize() // 8:
        yield Result("huge pages", OK, value)
    elif mode == "never":
        path = "/sys/kernel/mm/transparent_hugepage/enabled"
        yield Result("huge pages", SLOW, value, cost, f"echo madvise | sudo tee {path}")
    elif setting != "1":
        yield Result(
            "huge pages", SLOW, value, cost, "unset DLRM_TUNE; export THP_MEM_ALLOC_ENABLE=1"
        )
    else:
        yield Result("huge pages", SLOW, value, cost)
    value = f"touching {megabytes} MB that were just freed takes {again} page faults"
    if again < 100:
        yield Result("freed memory", OK, f"is kept for the next step: {value}")
    else:
        value = f"goes back to the kernel: {value}"
        yield Result("freed memory", SLOW, value, cost, _fix_of_freed_memory())


def room() -> Iterator[Result]:
    """Reports free memory and disk space."""
    if (memory := host_memory()) is not None:
        free, total = memory
        value = f"{free / GIB:.1f} GiB free of {total / GIB:.1f} that this process may take"
        cost = "models above that do not fit: 26 tables of 100,000 rows of 128 floats take 1.3 GiB"
        low = free < 4 * GIB
        yield Result("memory", NOTE if low else OK, value, cost if low else "")
    usage = shutil.disk_usage(Path.cwd())
    low = usage.free < 10 * GIB
    yield Result(
        "disk",
        NOTE if low else OK,
        f"{usage.free / GIB:.1f} GiB free of {usage.total / GIB:.1f} in {Path.cwd()}",
        "preprocessing and checkpoints need room: 1.3 GiB for the tables above" if low else "",
    )


def _fix_of_freed_memory() -> str:
    if not environment.tuned():
        return "unset DLRM_TUNE"
    wanted = environment.malloc_settings()
    others = [name for name in wanted if os.environ.get(name, wanted[name]) != wanted[name]]
    others += [name for name in ("LD_PRELOAD",) if os.environ.get(name)]
    if others:
        return f"unset {' '.join(others)}"
    return "export " + " ".join(f"{name}={value}" for name, value in wanted.items())


def offered_instructions() -> list[str]:
    """Returns the processor's instruction sets that the kernels use."""
    flags = set(read("/proc/cpuinfo").partition("flags")[2].partition("\n")[0].split())
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")
    return [name for name in wanted if name in flags]


def _faults_of_touching(torch, size: int) -> int:
    """Returns the page faults of allocating and writing a tensor, which is then freed."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensor = torch.empty(size, dtype=torch.uint8)
    tensor.zero_()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
