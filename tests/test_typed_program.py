"""Programs of users are checked against the package's own types."""

import os
import subprocess
import sys

import numpy as np
import pytest


@pytest.mark.slow
def test_a_program_passes_the_strict_checks_of_mypy(root, tmp_path):
    program = root / "tests" / "typed_program.py"
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", program]
    variables = {**os.environ, "MYPYPATH": str(root), "MYPY_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_the_program_runs(tmp_path):
    polars = pytest.importorskip("polars")
    import typed_program

    rows = {"clicked": [i % 2 for i in range(300)], "price": [float(i % 7) for i in range(300)]}
    scores, auc = typed_program.train_and_score(polars.DataFrame(rows), str(tmp_path / "model"))
    assert scores.shape == (300,)
    assert 0 <= auc <= 1
    assert np.all((scores > 0) & (scores < 1))
