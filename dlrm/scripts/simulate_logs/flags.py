"""Forwards to the package, until benchmarks/remote.py imports from there."""

from dlrm.scripts.simulate_logs import Simulation  # noqa: F401
