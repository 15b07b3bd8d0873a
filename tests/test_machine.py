"""All versions of the kernel's files on cores and memory are read."""

import os

import pytest

from dlrm import machine, variables

GIB = 2**30
MEMINFO = {
    "/proc/meminfo": "MemTotal: 8388608 kB\nMemAvailable: 6291456 kB\nSwapFree: 1048576 kB\n"
}
V2 = {
    "/proc/self/cgroup": "0::/pod/job\n",
    "/sys/fs/cgroup/pod/job/memory.max": "max\n",
    "/sys/fs/cgroup/pod/job/memory.current": f"{GIB}\n",
    "/sys/fs/cgroup/pod/memory.max": f"{4 * GIB}\n",
    "/sys/fs/cgroup/pod/memory.current": f"{3 * GIB}\n",
    "/sys/fs/cgroup/pod/memory.stat": f"anon {GIB}\nfile {2 * GIB}\n",
}
V2_CACHES = {
    **V2,
    "/sys/fs/cgroup/pod/memory.stat": f"anon 0\nfile {GIB}\nslab_reclaimable {2 * GIB}\n",
}
V2_WITHOUT_SWAP = {
    **V2,
    "/sys/fs/cgroup/pod/memory.swap.max": "0\n",
    "/sys/fs/cgroup/pod/memory.swap.current": "0\n",
}
V1 = {
    "/proc/self/cgroup": "5:cpu:/\n4:memory:/docker/job\n",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
    "/sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
}
V1_TOGETHER = {
    "/proc/self/cgroup": "5:cpuacct,memory:/docker/job\n",
    "/sys/fs/cgroup/memory/docker/job/memory.limit_in_bytes": f"{3 * GIB}\n",
    "/sys/fs/cgroup/memory/docker/job/memory.usage_in_bytes": f"{GIB}\n",
}
NO_LIMIT = {**V1, "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}


@pytest.mark.parametrize(
    ("groups", "free", "total"),
    [
        ({}, 6 + 1, 8),
        (V2, 4 - 3 + 2 + 1, 4),  # limit - used + file cache + swap
        (V2_CACHES, 4 - 3 + 1 + 2 + 1, 4),
        (V2_WITHOUT_SWAP, 4 - 3 + 2, 4),
        (V1, 2 - 1 + 1, 2),
        (V1_TOGETHER, 3 - 1 + 1, 3),
        (NO_LIMIT, 6 + 1, 8),
    ],
)
def test_memory_is_what_the_machine_and_its_groups_leave(groups, free, total, monkeypatch):
    files = MEMINFO | groups
    monkeypatch.setattr(machine, "read", lambda path: files.get(path, ""))
    assert machine.host_memory() == (free * GIB, total * GIB)


@pytest.mark.parametrize("meminfo", ["", "MemTotal: 8388608 kB\nMemFree: 6291456 kB\n"])
def test_what_proc_does_not_say_is_unknown(meminfo, monkeypatch):
    monkeypatch.setattr(machine, "read", lambda path: meminfo)
    assert machine.host_memory() is None


CORES_V2 = {
    "/proc/self/cgroup": "0::/pod/job\n",
    "/sys/fs/cgroup/pod/job/cpu.max": "max 100000\n",
    "/sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
}
CORES_V1 = {
    "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "30000\n",
    "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
}
UNLIMITED = CORES_V1 | {"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n"}


@pytest.mark.parametrize(
    ("files", "given", "threads"),
    [
        (CORES_V2, None, "1"),
        (CORES_V1, None, "1"),
        (CORES_V2, "4", "4"),
        (UNLIMITED, None, None),
        ({"/sys/fs/cgroup/cpu.max": "409600000 100000"}, None, None),
    ],
)
def test_threads_are_as_many_as_the_cores_of_the_control_group(files, given, threads, monkeypatch):
    monkeypatch.setattr(machine, "read", lambda path: files.get(path, ""))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8))
    monkeypatch.setattr(os, "environ", {} if given is None else {"OMP_NUM_THREADS": given})
    variables.set_variables()
    assert os.environ.get("OMP_NUM_THREADS") == threads
    monkeypatch.setattr(os, "environ", {"DLRM_TUNE": "0"})
    variables.set_variables()
    assert os.environ == {"DLRM_TUNE": "0"}


def test_idle_cores_are_those_that_no_process_uses():
    if machine.idle_cores(0) is None:
        pytest.skip("this machine does not report idle time")
    assert 0 <= machine.idle_cores(0.1) <= (os.cpu_count() or 1) + 0.5


@pytest.mark.parametrize(
    ("texts", "idle"),
    [
        (("cpu  5 0 5 100 20 0 0 0", "cpu  9 0 9 130 40 0 0 0"), 0.5),  # ticks of 10 ms
        (("cpu  5 0 5 100 20 0 0 0", "cpu  9 0 9 100 20 0 0 0"), 0),
        (("", ""), None),
        (("cpu 1 2", "cpu 1 2"), None),
    ],
)
def test_idle_time_is_read_before_and_after_a_pause(texts, idle, monkeypatch):
    reads, clock = iter(texts), iter((0.0, 1.0))
    monkeypatch.setattr(machine, "read", lambda path: next(reads) + "\ncpu0 1 1 1 1 1\n")
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(machine.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(machine.os, "sysconf", lambda name: 100)
    assert machine.idle_cores() == idle
