"""Compares what a command would need with what there is, before anything is allocated or begun.

A need is a lower bound and what is free an upper bound, so no job that fits is refused. What a file
claims is compared with its size by what knows the file's format. Only the standard library is
imported.
"""

import os
from pathlib import Path

from dlrm.host_memory import host_memory

MAX_FEATURES = 1 << 16  # numerical or categorical ones of a row
MAX_TASKS = 100_000  # that preprocessing is divided into
_PROCESSES_A_CORE = 16


def check_features(flag: str, count: int) -> None:
    """Raises ValueError where a row would have fewer than 0 or more than `MAX_FEATURES` features.

    Args:
        flag: what says it, for the message.
        count: how many.
    """
    if not 0 <= count <= MAX_FEATURES:
        raise ValueError(f"{flag} {count}: expected 0 to {MAX_FEATURES}")


def check_processes(flag: str, count: int) -> None:
    """Raises ValueError where there would be fewer than 1 or more than 16 processes a core."""
    most = _PROCESSES_A_CORE * (os.cpu_count() or 1)
    if not 1 <= count <= most:
        raise ValueError(f"{flag} {count}: expected 1 to {most}, {_PROCESSES_A_CORE} a core")


def check_disk(directory: str | os.PathLike, needed: int, what: str) -> None:
    """Compares the bytes that will be written with those free on the disk.

    Args:
        directory: where; it need not exist.
        needed: bytes.
        what: what needs them, for the message.

    Raises:
        ValueError: fewer are free; both are named.
    """
    path = Path(directory).absolute()
    existing = next(one for one in (path, *path.parents) if one.exists())
    status = os.statvfs(existing)
    free = status.f_bfree * status.f_frsize  # with what is kept for root, who may run this
    if needed > free:
        raise ValueError(
            f"{what}: needs {_gb(needed)} on the disk, {existing} has {_gb(free)} free"
        )


def check_memory(needed: int, what: str) -> None:
    """Compares the bytes that will be allocated with the memory and swap that are free.

    Raises:
        ValueError: fewer are free, also because of the limit of a control group; both are named.
    """
    memory = host_memory()
    if memory is not None and needed > memory[0]:
        raise ValueError(
            f"{what}: needs {_gb(needed)} of memory, of which {_gb(memory[0])} are free"
        )


def _gb(count: int) -> str:
    return f"{count / 1e9:.3g} GB"
