"""All versions of the kernel's memory files are read."""

import pytest

from dlrm import host_memory

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
    monkeypatch.setattr(host_memory, "read", lambda path: files.get(path, ""))
    assert host_memory.host_memory() == (free * GIB, total * GIB)


@pytest.mark.parametrize("meminfo", ["", "MemTotal: 8388608 kB\nMemFree: 6291456 kB\n"])
def test_what_proc_does_not_say_is_unknown(meminfo, monkeypatch):
    monkeypatch.setattr(host_memory, "read", lambda path: meminfo)
    assert host_memory.host_memory() is None
