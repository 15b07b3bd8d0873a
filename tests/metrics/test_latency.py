"""Statistics of latencies, with a known answer."""

import pytest

from dlrm.metrics.latency import Latency


def test_known_answer():
    seconds = [float(value) for value in range(1000, -1, -1)]
    assert Latency.of(seconds) == pytest.approx((500, 0, 500, 950, 990, 999, 1000))
    assert Latency.of([0.5]) == (0.5,) * 7
