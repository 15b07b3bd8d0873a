"""Rules of measurement, on the runs that DLPerf published."""

import pytest

from dlrm.systems.measurement import RULES, measured, scaling, trend_gap

ONEFLOW = {  # images/s of 7 runs at each place: OneFlow's ResNet-50, float32, 128 images a device
    (1, 1): (383.8, 384.9, 385.1, 384.9, 383.7, 384.9, 382.3),
    (1, 8): (2961.6, 2961.6, 2969.5, 2990.0, 3006.3, 2985.9, 2967.2),
    (2, 16): (5915.6, 5921.0, 5862.3, 5974.3, 5906.6, 5826.5, 5859.8),
    (4, 32): (11651.9, 11797.7, 11613.3, 11746.5, 11749.2, 11682.2, 11711.2),
}
TABLE = {(1, 1): (384.9, 1.0), (1, 8): (2969.5, 7.71), (2, 16): (5906.6, 15.35)}
TABLE[4, 32] = (11711.2, 30.43)


def test_28_published_runs_give_the_published_table():
    rule = RULES["dlperf"]
    figures = {place: measured([[v] for v in runs], rule) for place, runs in ONEFLOW.items()}
    assert {place: figure.value for place, figure in figures.items()} == {
        place: value for place, (value, _) in TABLE.items()
    }
    for line in scaling({place: figure.value for place, figure in figures.items()}):
        assert round(line.speedup, 2) == TABLE[line.nodes, line.devices][1]
        assert line.efficiency == pytest.approx(line.speedup / line.devices)
    assert not any(figure.warning for figure in figures.values())
    assert figures[1, 1].spread == pytest.approx((385.1 - 382.3) / 384.9)


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


def test_nothing_is_measured_without_runs_or_without_one_device():
    with pytest.raises(ValueError, match="expected one run or more"):
        measured([], RULES["gaudi"])
    with pytest.raises(ValueError, match="1n1d"):
        scaling({(1, 2): 3.0})


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
    with pytest.raises(ValueError, match="more than 10 steps"):
        trend_gap([1.0] * 10, [1.0] * 10, 10)
