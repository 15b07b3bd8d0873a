"""Memory of this machine as the kernel reports it to this process, and the files that it reads."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

# Files of a group's limit and use, and entries of reclaimable memory in memory.stat.
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache")
_V2 = ("memory.max", "memory.current", "file|slab_reclaimable")


def host_memory() -> tuple[int, int] | None:
    """Returns the bytes available to this process, including swap, and the total memory in bytes.

    A control group provides its limit minus what its processes use; caches count as available. None
    if /proc is missing or incomplete.
    """
    fields = dict(re.findall(r"(\w+):\s+(\d+) kB", read("/proc/meminfo")))
    if not {"MemAvailable", "MemTotal", "SwapFree"} <= fields.keys():
        return None
    free, total, swap = (1024 * int(fields[n]) for n in ("MemAvailable", "MemTotal", "SwapFree"))
    v1 = Path("/sys/fs/cgroup/memory")
    for names, directories in ((_V2, control_groups()), (_V1, control_groups(v1, "memory"))):
        limit_file, used_file, caches = names
        for directory in directories:
            if (left := _left(directory, limit_file, used_file)) is not None:
                stat = read(str(directory / "memory.stat"))
                given_way = re.findall(rf"^(?:{caches}) (\d+)$", stat, re.MULTILINE)
                free = min(free, left + sum(map(int, given_way)))
                total = min(total, int(read(str(directory / limit_file))))
            left = _left(directory, "memory.swap.max", "memory.swap.current")
            swap = swap if left is None else max(min(swap, left), 0)
    return max(free, 0) + swap, total


def _left(directory: Path, limit_file: str, used_file: str) -> int | None:
    """Returns the rest of a control group's limit, or None without a limit."""
    limit, used = (read(str(directory / name)).strip() for name in (limit_file, used_file))
    return int(limit) - int(used) if limit.isdecimal() and used.isdecimal() else None


def machine() -> str:
    """Returns a name that distinguishes this machine, or this container, from others."""
    return f"{os.uname().nodename} {read('/proc/sys/kernel/random/boot_id').strip()}"


def control_groups(root: Path = Path("/sys/fs/cgroup"), controller: str = "") -> Iterator[Path]:
    """Yields the directories of this process's control group and of the groups above it.

    Args:
        root: their mount point.
        controller: of version 1; "" is version 2.
    """
    named = rf"(?:[^:]*,)?{controller}(?:,[^:]*)?" if controller else ""  # one of several
    line = re.search(rf"^\d+:{named}:/(.*)$", read("/proc/self/cgroup"), re.MULTILINE)
    directory = root / (line.group(1) if line else "")
    for candidate in (directory, *directory.parents):
        if candidate.is_relative_to(root):
            yield candidate


def read(path: str) -> str:
    """Returns the content of a kernel file, or "" if there is none."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
