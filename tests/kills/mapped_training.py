"""A training run with tables in files, to kill and compare; runs in forks, see killing.py."""

import sys
from pathlib import Path

import training  # noqa: F401  # prepares processes that can start no program

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tasks"))

from test_table_files import Run, assert_same

from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.directory import last_checkpoint


def train(folder, mapped):
    """Begins or resumes a run and completes it."""
    run = Run(folder, mapped, optimizer="adam")
    run.checkpoints.claim()
    last = last_checkpoint(folder / "run")
    if last is not None:
        run.trainer.resume(Checkpoint(last))
    run.fit()


def compare(folder, other):
    """Raises AssertionError unless two runs ended with the same bits."""
    assert_same(folder, other)
