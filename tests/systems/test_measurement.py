"""Measurement rules."""

import pytest

from dlrm.published.compared import trend_gap
from dlrm.published.rows import RULES
from dlrm.published.tables import measured

pytestmark = pytest.mark.long


def test_runs_that_differ_by_more_than_5_percent_are_warned_of():
    rule = RULES["dlperf"]
    assert not measured([[100.0], [102.0], [104.9]], rule).warning
    assert "differ by 7.8%, more than 5%" in measured([[100.0], [102.0], [108.0]], rule).warning


def test_a_series_leaves_its_first_value_out_in_each_run():
    figure = measured([[1.0, 10.0, 12.0], [2.0, 20.0, 22.0]], RULES["ipu"])
    assert figure.values == (11.0, 21.0)
    assert figure.value == 16.0
    with pytest.raises(ValueError, match="more than 1 logged values in each run"):
        measured([[1.0, 2.0], [1.0]], RULES["ipu"])


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
