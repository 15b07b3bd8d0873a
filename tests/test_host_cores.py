import os

import pytest

from dlrm import host_cores, variables


@pytest.mark.parametrize(
    ("quota", "given", "threads"),
    [
        (1.5, None, "1"),
        (0.3, None, "1"),
        (1.5, "4", "4"),
        (None, None, None),
        (4096.0, None, None),
    ],
)
def test_threads_are_as_many_as_the_cores_of_the_control_group(quota, given, threads, monkeypatch):
    monkeypatch.setattr(host_cores, "_control_group_cores", lambda: quota)
    monkeypatch.setattr(os, "environ", {} if given is None else {"OMP_NUM_THREADS": given})
    variables.set_variables()
    assert os.environ.get("OMP_NUM_THREADS") == threads
    monkeypatch.setattr(os, "environ", {"DLRM_TUNE": "0"})
    variables.set_variables()
    assert os.environ == {"DLRM_TUNE": "0"}


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", None), ("150000 100000", 1.5), ("", None)]
)
def test_the_quota_of_version_2_is_read(text, cores, tmp_path, monkeypatch):
    (tmp_path / "cpu.max").write_text(text)
    monkeypatch.setattr(host_cores, "control_groups", lambda: [tmp_path])
    if cores is not None:
        assert host_cores._control_group_cores() == cores
    elif not os.path.exists("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"):
        assert host_cores._control_group_cores() is None


def test_idle_cores_are_those_that_no_process_uses():
    if host_cores.idle_cores(0) is None:
        pytest.skip("this machine does not report idle time")
    assert 0 <= host_cores.idle_cores(0.1) <= (os.cpu_count() or 1) + 0.5


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
    monkeypatch.setattr(host_cores, "read", lambda path: next(reads) + "\ncpu0 1 1 1 1 1\n")
    monkeypatch.setattr(host_cores.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(host_cores.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(host_cores.os, "sysconf", lambda name: 100)
    assert host_cores.idle_cores() == idle
