"""The benchmarks of training steps run, here with tiny sizes; their figures mean nothing."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

TINY = ["--workload=kaggle", "--dtype=fp32"]
COMMANDS = {
    "train.py": [*TINY, "--batch=64", "--steps=3", "--rounds=1"],
    "breakdown.py": [*TINY, "--batch=64", "--steps=12"],
    "scaling.py": [*TINY, "--steps=2", "--rounds=1"],
    "overhead.py": ["--rounds=1", "--steps=20"],
    "lists.py": [*TINY, "--optimizer=sgd", "--steps=2", "--rounds=1"],
    "attention.py": ["--length=5", "--batch_size=64", "--optimizer=sgd", "--steps=2", "--rounds=1"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_prints_a_table_of_figures(root, name):
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(root / "benchmarks" / name), *COMMANDS[name]],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if any(map(str.isdigit, line))]
    assert rows, done.stdout
