"""A training run with rows in a store, to kill and compare; runs in forks, see killing.py."""

import sys
from pathlib import Path

import training  # noqa: F401  # prepares processes that can start no program

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tasks"))

from test_table_store import Run, assert_same

from dlrm.train.checkpoints.directory import last_checkpoint


def train(folder, stored):
    """Begins or resumes a run and completes it."""
    run = Run(folder, stored, optimizer="adam", slots=90)
    run.checkpoints.claim()
    last = last_checkpoint(folder / "run")
    if last is not None:
        run.trainer.resume(last)
    run.fit()


def compare(folder, other):
    """Raises AssertionError unless two runs ended with the same bits."""
    assert_same(folder, other)
