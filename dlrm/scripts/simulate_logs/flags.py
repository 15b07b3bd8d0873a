"""Forwards to `dlrm.scripts.simulate_logs.command`, until benchmarks/remote.py names that."""

from dlrm.scripts.simulate_logs.command import Simulation  # noqa: F401
