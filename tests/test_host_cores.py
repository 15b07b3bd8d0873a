import os
import subprocess
import sys

import pytest

from dlrm import host_cores

SCRIPT = """
import os
from dlrm import host_cores
host_cores._control_group_cores = lambda: {quota}
import dlrm.environment
print(os.environ.get("OMP_NUM_THREADS"))
"""


@pytest.mark.parametrize(
    ("quota", "given", "threads"),
    [
        (1.5, None, "1"),
        (0.3, None, "1"),
        (1.5, "4", "4"),
        (None, None, "None"),
        (4096.0, None, "None"),
    ],
)
def test_threads_are_as_many_as_the_cores_of_the_control_group(quota, given, threads, root):
    variables = {**os.environ, "PYTHONPATH": str(root)}
    variables.pop("OMP_NUM_THREADS", None)
    if given:
        variables["OMP_NUM_THREADS"] = given
    command = [sys.executable, "-c", SCRIPT.format(quota=quota)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == threads


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
