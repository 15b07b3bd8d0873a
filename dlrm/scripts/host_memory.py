"""Memory of this machine as its kernel shows it to this process, and the files that say so."""

import platform
import re
from collections.abc import Iterator
from pathlib import Path

_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache")
_V2 = ("memory.max", "memory.current", "file")


def host_memory() -> tuple[int, int] | None:
    """Returns the bytes that this process can get, swap included, and the bytes of memory in all.

    A control group leaves its limit less what its processes use; caches of files give way. None
    where there is no /proc.
    """
    fields = dict(re.findall(r"(\w+):\s+(\d+) kB", read("/proc/meminfo")))
    if not fields:
        return None
    free, total, swap = (1024 * int(fields[n]) for n in ("MemAvailable", "MemTotal", "SwapFree"))
    v1 = Path("/sys/fs/cgroup/memory")
    for names, directories in ((_V2, control_groups()), (_V1, control_groups(v1, "memory"))):
        limit_file, used_file, cache_name = names
        for directory in directories:
            limit, used = (read(str(directory / name)).strip() for name in (limit_file, used_file))
            if limit.isdecimal() and used.isdecimal():
                stat = read(str(directory / "memory.stat"))
                cache = re.search(rf"^{cache_name} (\d+)$", stat, re.MULTILINE)
                free = min(free, int(limit) - int(used) + int(cache.group(1) if cache else 0))
                total = min(total, int(limit))
    return max(free, 0) + swap, total


def machine() -> str:
    """What tells this machine, or this container, from others."""
    return f"{platform.node()} {read('/proc/sys/kernel/random/boot_id').strip()}"


def control_groups(root: Path = Path("/sys/fs/cgroup"), controller: str = "") -> Iterator[Path]:
    """Directories of this process's control group and of those above it.

    Args:
        root: where they are mounted.
        controller: of version 1; "" is version 2.
    """
    own = re.search(rf"^\d+:{controller}:/(.*)$", read("/proc/self/cgroup"), re.MULTILINE)
    directory = root / (own.group(1) if own else "")
    for candidate in (directory, *directory.parents):
        if candidate.is_relative_to(root):
            yield candidate


def read(path: str) -> str:
    """A file of the kernel's, or nothing where there is none."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
