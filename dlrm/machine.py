"""Cores and memory that this process may use, within its affinity and its control groups."""

import os
import platform
import re
import time
from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")


def available_cores() -> tuple[float, str]:
    """Returns the cores that this process may use, and the origin of the limit."""
    total = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    cores, why = float(allowed), "all" if allowed == total else f"affinity, of {total}"
    for quota in _core_quotas():
        if quota < cores:
            cores, why = quota, f"control group's limit, of {total}"
    return cores, why


def _core_quotas() -> Iterator[float]:
    """Yields the cores that control groups of version 2 and 1 allow; none without a limit."""
    texts = [read(f"{group}/cpu.max") for group in control_groups()]
    texts += [
        f"{read(f'{group}/cpu.cfs_quota_us')} {read(f'{group}/cpu.cfs_period_us')}"
        for group in control_groups("cpu")
    ]
    for words in map(str.split, texts):
        if len(words) == 2 and words[0].isdecimal():
            yield int(words[0]) / int(words[1])


def idle_cores(seconds: float = 0.2) -> float | None:
    """Returns the number of cores that are idle while this process sleeps; None if unknown.

    The load average would count what this process itself did in the last minutes.
    """
    before, began = _idle_seconds(), time.perf_counter()
    time.sleep(seconds)
    after = _idle_seconds()
    if before is None or after is None:
        return None
    return (after - before) / (time.perf_counter() - began)


def _idle_seconds() -> float | None:
    """Returns the idle time of all cores since the machine started."""
    found = re.match(r"cpu +\d+ \d+ \d+ (\d+) (\d+)", read("/proc/stat"))
    return sum(map(int, found.groups())) / os.sysconf("SC_CLK_TCK") if found else None


def host_memory() -> tuple[int, int] | None:
    """Returns the bytes available to this process, including swap, and the total memory in bytes.

    A control group provides its limit minus what its processes use; caches count as available. None
    if /proc is missing or incomplete.
    """
    fields = dict(re.findall(r"(\w+):\s+(\d+) kB", read("/proc/meminfo")))
    if not {"MemAvailable", "MemTotal", "SwapFree"} <= fields.keys():
        return None
    free, total, swap = (1024 * int(fields[n]) for n in ("MemAvailable", "MemTotal", "SwapFree"))
    of_versions = [
        (control_groups(), "max", "current", "file|slab_reclaimable"),
        (control_groups("memory"), "limit_in_bytes", "usage_in_bytes", "total_cache"),
    ]
    for groups, limit, used, caches in of_versions:
        for group in groups:
            if (bounds := _bounds(group, f"memory.{limit}", f"memory.{used}")) is not None:
                stat = read(f"{group}/memory.stat")
                cached = re.findall(rf"^(?:{caches}) (\d+)$", stat, re.MULTILINE)
                free = min(free, bounds[0] - bounds[1] + sum(map(int, cached)))
                total = min(total, bounds[0])
            if (bounds := _bounds(group, "memory.swap.max", "memory.swap.current")) is not None:
                swap = max(min(swap, bounds[0] - bounds[1]), 0)
    return max(free, 0) + swap, total


def _bounds(group: Path, limit: str, used: str) -> tuple[int, int] | None:
    """Returns a control group's limit and what is used of it, or None without a limit."""
    texts = [read(f"{group}/{name}").strip() for name in (limit, used)]
    return (int(texts[0]), int(texts[1])) if all(map(str.isdecimal, texts)) else None


def machine() -> str:
    """Returns a name that distinguishes this machine, or this container, from others."""
    return f"{os.uname().nodename} {read('/proc/sys/kernel/random/boot_id').strip()}"


def control_groups(controller: str = "") -> Iterator[Path]:
    """Yields the directories of this process's control group and of the groups above it.

    Args:
        controller: of version 1; "" is version 2.
    """
    root, named = _GROUPS / controller, ""
    if controller:
        named = rf"(?:[^:]*,)?{controller}(?:,[^:]*)?"  # one of several
    line = re.search(rf"^\d+:{named}:/(.*)$", read("/proc/self/cgroup"), re.MULTILINE)
    directory = root / (line[1] if line else "")
    for candidate in (directory, *directory.parents):
        if candidate.is_relative_to(root):
            yield candidate


def processor() -> str:
    """Returns the name of the CPU."""
    found = re.search(r"^model name\s*:\s*(.+?)\s*$", read("/proc/cpuinfo"), re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def read(path: str) -> str:
    """Returns the content of a kernel file, or "" if there is none."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
