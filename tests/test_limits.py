"""Memory requests are compared with the free memory that the kernel reports."""

import os

import pytest

from dlrm import limits, machine

GIB = 2**30
FILES = {
    "/proc/meminfo": "MemTotal: 8388608 kB\nMemAvailable: 6291456 kB\nSwapFree: 1048576 kB\n",
    "/proc/self/cgroup": "0::/job\n",
}
GROUP = {
    "/sys/fs/cgroup/job/memory.max": f"{3 * GIB}\n",
    "/sys/fs/cgroup/job/memory.current": f"{GIB}\n",
}


@pytest.mark.parametrize(
    ("files", "free"), [(FILES, 7 * GIB), (FILES | GROUP, 3 * GIB)], ids=["machine", "group"]
)
def test_memory_beyond_what_is_free_is_refused_and_no_less(files, free, monkeypatch):
    monkeypatch.setattr(machine, "read", lambda path: files.get(path, ""))
    limits.check_memory(free, "--batch")
    with pytest.raises(ValueError, match=r"^--batch: needs .* GB of memory, of which .* are free$"):
        limits.check_memory(free + 1, "--batch")


def test_a_disk_has_what_is_kept_for_root_too(tmp_path):
    status = os.statvfs(tmp_path)
    limits.check_disk(tmp_path / "new", status.f_bavail * status.f_frsize, "--rows")
    with pytest.raises(ValueError, match="--rows: needs .* on the disk"):
        limits.check_disk(tmp_path / "new", status.f_blocks * status.f_frsize + 1, "--rows")
