"""The GPU benchmark runs all its parts, here on the CPU with tiny sizes."""

import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.long


def run(root, *words):
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, str(root / "benchmarks" / "gpu.py"), *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )


@pytest.mark.slow
def test_every_figure_of_the_table_is_measured(root):
    done = run(root, "--device=cpu", "--tiny")
    assert done.returncode == 0, done.stderr
    table = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    header, *rows = table
    assert header == ["| figure", "measured", "target", "beside it |"]
    targets = [">= 12 M", ">= 15 M", ">= 60 %", ">= 60 %", ">= 50 %", ">= 4", "-"]
    assert [row[2] for row in rows] == targets
    for row in rows:
        assert float(row[1].rstrip("M% ")) >= 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(root):
    done = run(root)
    assert done.returncode == 1
    assert done.stderr == "gpu.py: torch finds no GPU here; --device cpu --tiny tries the parts\n"
