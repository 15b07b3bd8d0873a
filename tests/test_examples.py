"""The examples run and learn what is in their data."""

import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.long


def test_the_training_example_learns_and_scores(root, tmp_path):
    done = subprocess.run(
        [sys.executable, root / "examples" / "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *_, rare, frequent, result = done.stdout.splitlines()
    # Planted: 0.25 and 0.79. The best possible AUC is about 0.74.
    assert abs(float(rare.split()[-1]) - 0.25) < 0.1
    assert abs(float(frequent.split()[-1]) - 0.79) < 0.1
    assert float(re.fullmatch(r"test AUC, which chose .*: (0\.\d+)", result)[1]) > 0.72
    assert not list(tmp_path.iterdir())  # its files are temporary
