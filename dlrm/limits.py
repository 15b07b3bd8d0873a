"""Compares a command's needs with available resources before anything is allocated.

The need is a lower bound, and what is free an upper one, so no job that fits is refused.
"""

import os
from pathlib import Path

from dlrm.machine import host_memory

MAX_FEATURES = 1 << 16  # numerical or categorical ones of a row
MAX_TASKS = 100_000  # that preprocessing is divided into
_PROCESSES_A_CORE = 16


def check_features(flag: str, count: int) -> None:
    """Raises ValueError, which names the flag, for fewer than 0 or too many features of a row."""
    if not 0 <= count <= MAX_FEATURES:
        raise ValueError(f"{flag} {count}: expected 0 to {MAX_FEATURES}")


def check_processes(flag: str, count: int) -> None:
    """Raises ValueError for fewer than 1 process or more than 16 per core."""
    most = _PROCESSES_A_CORE * (os.cpu_count() or 1)
    if not 1 <= count <= most:
        raise ValueError(f"{flag} {count}: expected 1 to {most}, {_PROCESSES_A_CORE} a core")


def check_disk(directory: str | os.PathLike, needed: int, what: str) -> None:
    """Raises ValueError, which names `what`, if fewer bytes are free on the disk of a directory.

    The directory need not exist.
    """
    path = Path(directory).absolute()
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    status = os.statvfs(existing)
    free = status.f_bfree * status.f_frsize  # includes the part reserved for root, who may run this
    if needed > free:
        both = f"{_gb(needed)} on the disk, {existing} has {_gb(free)} free"
        raise ValueError(f"{what}: needs {both}")


def check_memory(needed: int, what: str) -> None:
    """Raises ValueError, which names `what`, if fewer bytes of memory and swap are free."""
    free = (host_memory() or (needed, needed))[0]
    if needed > free:
        raise ValueError(f"{what}: needs {_gb(needed)} of memory, of which {_gb(free)} are free")


def _gb(count: int) -> str:
    return f"{count / 1e9:.3g} GB"
