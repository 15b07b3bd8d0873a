"""Measurement rules."""

import pytest

from dlrm.published.compared import trend_gap

pytestmark = pytest.mark.long


def test_losses_that_drift_apart_have_a_gap():
    reference = [1.0 + 1.0 / step for step in range(1, 101)]
    assert trend_gap(reference, reference, 20) == 0
    worse = [*reference[:60], *(loss * 1.1 for loss in reference[60:])]
    assert 0.05 < trend_gap(worse, reference, 20) < 0.1
    early = [2 * reference[0], *reference[1:]]
    assert trend_gap(early, reference, 60) < 1e-2 < trend_gap(early, reference, 0)


@pytest.mark.parametrize(
    ("losses", "problem"),
    [([1.0] * 9, "as many losses"), ([1.0] * 4 + [float("nan")] * 6, "NaN")],
)
def test_losses_that_cannot_be_compared_are_refused(losses, problem):
    with pytest.raises(ValueError, match=problem):
        trend_gap(losses, [1.0] * 10, 2)
