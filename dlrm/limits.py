"""Compares a command's needs with available resources before anything is allocated.

Compares a lower bound on the need with an upper bound on free resources, so no job that fits is
refused. Readers of a format compare a file's claims with its size. Only the standard library is
imported.
"""

import os
from pathlib import Path

from dlrm.machine import host_memory

MAX_FEATURES = 1 << 16  # numerical or categorical ones of a row
MAX_TASKS = 100_000  # that preprocessing is divided into
_PROCESSES_A_CORE = 16


def check_features(flag: str, count: int) -> None:
    """Raises ValueError if a row would have fewer than 0 or more than `MAX_FEATURES` features.

    Args:
        flag: its source, for the message.
    """
    if not 0 <= count <= MAX_FEATURES:
        raise ValueError(f"{flag} {count}: expected 0 to {MAX_FEATURES}")


def check_processes(flag: str, count: int) -> None:
    """Raises ValueError for fewer than 1 process or more than 16 per core."""
    most = _PROCESSES_A_CORE * (os.cpu_count() or 1)
    if not 1 <= count <= most:
        raise ValueError(f"{flag} {count}: expected 1 to {most}, {_PROCESSES_A_CORE} a core")


def check_disk(directory: str | os.PathLike, needed: int, what: str) -> None:
    """Compares the bytes to be written with those free on the disk.

    Args:
        directory: directory to write to, which need not exist.
        what: their purpose, for the message.

    Raises:
        ValueError: fewer are free; the message has both numbers.
    """
    path = Path(directory).absolute()
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    status = os.statvfs(existing)
    free = status.f_bfree * status.f_frsize  # includes the part reserved for root, who may run this
    if needed > free:
        raise ValueError(
            f"{what}: needs {_gb(needed)} on the disk, {existing} has {_gb(free)} free"
        )


def check_memory(needed: int, what: str) -> None:
    """Compares the bytes to be allocated with free memory and swap.

    Raises:
        ValueError: fewer are free, possibly by a control group's limit; the message has both.
    """
    memory = host_memory()
    if memory is not None and needed > memory[0]:
        raise ValueError(
            f"{what}: needs {_gb(needed)} of memory, of which {_gb(memory[0])} are free"
        )


def _gb(count: int) -> str:
    return f"{count / 1e9:.3g} GB"
