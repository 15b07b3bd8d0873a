"""A training run with tables in files, killed anywhere, resumes bit for bit."""

import random
import shutil
import tempfile
from pathlib import Path

import mapped_training
import pytest
from killing import Forks, kill_points

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def forks():
    with Forks("mapped_training") as started:
        yield started


@pytest.fixture
def folder():
    """Returns a folder, in memory if possible: every checkpoint waits for the disk."""
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=base) as path:
        yield Path(path)


def kill_and_compare(forks, folder, kills, seed):
    """Kills runs at random calls, each again after it resumes; then lets them finish."""
    forks.result(mapped_training.train, folder / "whole", False)
    run, chosen = folder / "killed", random.Random(seed)
    outcome = forks.run(mapped_training.train, run, True, below=run)
    assert not outcome.error, outcome.error
    shutil.rmtree(run)
    points = kill_points(outcome.calls, 1, seed)
    killed = 0
    while killed < kills:
        for _ in range(2):  # the second kill may hit a run that resumes
            at, half = chosen.choice(points)
            outcome = forks.run(mapped_training.train, run, True, below=run, at=at, half=half)
            assert outcome.killed or not outcome.error, outcome.error
            killed += outcome.killed
        forks.result(mapped_training.train, run, True)
        forks.result(mapped_training.compare, folder / "whole", run)
        shutil.rmtree(run)
    print(f"{killed} kills, all resumed with the same bits")


def test_a_killed_training_resumes_with_the_same_bits(forks, folder):
    kill_and_compare(forks, folder, kills=3, seed=1)


@pytest.mark.slow
def test_many_killed_trainings_resume_with_the_same_bits(forks, folder):
    kill_and_compare(forks, folder, kills=20, seed=2)
