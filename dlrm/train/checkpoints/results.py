"""A name of before, until its caller uses `runs`."""

from dlrm.train.checkpoints.runs import write_results

__all__ = ["write_results"]
