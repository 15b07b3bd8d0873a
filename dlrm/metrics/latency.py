"""Latency: statistics of the seconds that batches take."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Latency(NamedTuple):
    """Statistics of latencies, in seconds; percentiles are interpolated linearly."""

    mean: float
    min: float
    p50: float
    p95: float
    p99: float
    p999: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Latency":
        """Returns the statistics of one or more latencies."""
        p50, p95, p99, p999 = np.percentile(seconds, (50, 95, 99, 99.9)).tolist()
        return cls(float(np.mean(seconds)), min(seconds), p50, p95, p99, p999, max(seconds))
