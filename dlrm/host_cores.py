"""The processor cores that this process may use, within its affinity and control groups."""

import os
import time
from pathlib import Path

from dlrm.host_memory import control_groups, read


def available_cores() -> tuple[float, str]:
    """Returns the cores that this process may use, and the origin of the limit."""
    total = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    cores, why = float(allowed), "all" if allowed == total else f"affinity, of {total}"
    quota = _control_group_cores()
    if quota is not None and quota < cores:
        cores, why = quota, f"control group's limit, of {total}"
    return cores, why


def idle_cores(seconds: float = 0.2) -> float | None:
    """Returns the number of cores that are idle while this process sleeps; None if unknown.

    The load average would count what this process itself did in the last minutes.
    """
    before, began = _idle_seconds(), time.perf_counter()
    if before is None:
        return None
    time.sleep(seconds)
    after = _idle_seconds()
    return None if after is None else (after - before) / (time.perf_counter() - began)


def _idle_seconds() -> float | None:
    """Returns the idle time of all cores since the machine started."""
    words = read("/proc/stat").partition("\n")[0].split()
    if len(words) < 6 or words[0] != "cpu":
        return None
    idle, waiting = map(int, words[4:6])
    return (idle + waiting) / os.sysconf("SC_CLK_TCK")


def _control_group_cores() -> float | None:
    """Returns the cores that the control group, version 2 or 1, allows; None without a limit."""
    for directory in control_groups():
        quota, _, period = read(str(directory / "cpu.max")).partition(" ")
        if quota.isdecimal() and period.strip().isdecimal():
            return int(quota) / int(period)
    folder = Path("/sys/fs/cgroup/cpu")
    quota, period = (read(str(folder / f"cpu.cfs_{n}_us")).strip() for n in ("quota", "period"))
    if quota.isdecimal() and period.isdecimal():
        return int(quota) / int(period)
    return None
