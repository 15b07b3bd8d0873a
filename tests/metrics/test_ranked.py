"""Metrics of scored rows match scikit-learn and plain Python."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from sklearn.metrics import (
    average_precision_score,
    log_loss,
    mean_squared_error,
    roc_auc_score,
)

from dlrm.metrics.clicks import click_metrics
from dlrm.metrics.ranked import BINS, RankedRows, wilson
from dlrm.metrics.table import METRICS, TOPS


def rows(count, levels=None, weighted=False, seed=0):
    """Returns logits, labels and weights; with `levels`, logits tie; some weights are 0."""
    random = np.random.default_rng(seed)
    logits = random.normal(-1, 1.5, count).astype(np.float32)
    if levels:
        logits = np.round(logits * levels / 8) * 8 / levels
    labels = (random.random(count) < 1 / (1 + np.exp(-logits - 0.3))).astype(np.float32)
    return logits, labels, random.integers(0, 4, count) / 2 if weighted else None


def gain_of(chances, labels, weights, top):
    """Returns the share of clicks among the top scores, spreading ties evenly."""
    left, clicks = top * weights.sum(), 0.0
    for score in sorted(set(chances.tolist()), reverse=True):
        here = chances == score
        rows_here = weights[here].sum()
        if not rows_here:
            continue
        part = min(left / rows_here, 1)
        clicks += part * (weights * labels)[here].sum()
        left -= part * rows_here
    return clicks / (weights * labels).sum()


def ece_of(chances, labels, weights):
    """Computes the ECE, binning each score by the middle of its rows in score order."""
    bins, below = {}, 0.0
    for score in sorted(set(chances.tolist())):
        here = chances == score
        rows_here = weights[here].sum()
        place = min(int((below + rows_here / 2) / weights.sum() * BINS), BINS - 1)
        gap = (weights * (chances - labels))[here].sum()
        bins[place] = bins.get(place, 0.0) + gap
        below += rows_here
    return sum(map(abs, bins.values())) / weights.sum()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("levels", [None, 3, 20])
def test_metrics_are_those_of_the_oracles(levels, weighted):
    logits, labels, weights = rows(800, levels, weighted)
    found = RankedRows(logits, labels, weights).metrics()
    assert found.keys() <= METRICS.keys()
    w, chances = np.ones(800) if weights is None else weights, 1 / (1 + np.exp(-np.float64(logits)))
    rate = (w * labels).sum() / w.sum()
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    loss = log_loss(labels, chances, sample_weight=w)
    expected = {
        "auc": roc_auc_score(labels, chances, sample_weight=w),
        "log_loss": loss,
        "normalized_entropy": loss / entropy,
        "calibration": (w * chances).sum() / (w * labels).sum(),
        "ece": ece_of(chances, labels, w),
        "pr_auc": average_precision_score(labels, chances, sample_weight=w),
        "rmse": math.sqrt(mean_squared_error(labels, chances, sample_weight=w)),
    }
    for top in TOPS:
        gain = gain_of(chances, labels, w, top)
        expected |= {f"gain@{100 * top:g}%": gain, f"lift@{100 * top:g}%": gain / top}
    assert found == pytest.approx(expected, rel=1e-9)


def test_metrics_agree_with_those_of_training():
    logits, labels, _ = rows(5000, 50)
    of_training = click_metrics(torch.from_numpy(logits), torch.from_numpy(labels))
    found = RankedRows(logits, labels).metrics()
    assert {name: found[name] for name in of_training} == pytest.approx(of_training, rel=1e-9)


def test_counts_are_rows_that_occur_so_often():
    logits, labels, weights = rows(300, 10, weighted=True)
    counts = np.random.default_rng(1).integers(0, 3, 300)
    repeated = (np.repeat(array, counts) for array in (logits, labels, weights))
    expected = RankedRows(*repeated).metrics()
    assert RankedRows(logits, labels, weights).metrics(counts) == pytest.approx(expected, rel=1e-9)


def test_curves_end_where_the_metrics_say():
    logits, labels, _ = rows(2000, 40)
    ranked = RankedRows(logits, labels)
    found = ranked.metrics()
    curves = ranked.curves()
    weight, predicted, observed, *bounds = curves["reliability"].values()
    assert weight.sum() == 2000
    np.testing.assert_array_equal(bounds, wilson(observed, weight))
    assert (weight * np.abs(predicted - observed)).sum() / 2000 == pytest.approx(found["ece"])
    shares, gains = curves["gain"].values()
    assert (gains[0], gains[-1]) == (0, 1)
    assert gains[shares.tolist().index(0.2)] == pytest.approx(found["gain@20%"])
    recall, precision = curves["precision_recall"].values()
    assert (recall[-1], precision[-1]) == (1, labels.astype(float).mean())
    edges, counts = curves["scores"].values()
    assert (edges[0], edges[-1], counts.sum()) == (0, ranked.probabilities.max(), 2000)


def test_weighted_bins_count_as_many_rows_as_vary_as_much():
    """Of weights 1 and 3 in turns: (1 + 3)^2 / (1 + 9) = 1.6 for two rows."""
    logits, labels, _ = rows(1500, 0)
    weights = np.where(np.arange(1500)[np.argsort(np.argsort(logits))] % 2, 3.0, 1.0)
    curves = RankedRows(logits, labels, weights).curves()
    bins = curves["reliability"]
    expected = wilson(bins["observed"], bins["weight"] / 2 * 0.8)
    np.testing.assert_allclose([bins["low"], bins["high"]], expected, rtol=0.02)
    assert curves["scores"]["rows"].sum() == weights.sum()


@pytest.mark.parametrize(("clicks", "rows"), [(0, 10), (1, 10), (7, 10), (10, 10), (83, 4000)])
def test_rates_have_wilsons_interval(clicks, rows):
    expected = binomtest(clicks, rows).proportion_ci(0.95, "wilson")
    found = wilson(np.array([clicks / rows]), np.array([rows]))
    assert np.concatenate(found) == pytest.approx([expected.low, expected.high], abs=1e-12)


@pytest.mark.parametrize("label", [0, 1])
def test_one_class_leaves_undefined_what_needs_two(label):
    found = RankedRows(np.arange(5.0), np.full(5, label)).metrics()
    undefined = {name for name, value in found.items() if math.isnan(value)}
    needs_two = {"auc", "normalized_entropy"}
    needs_clicks = {name for name in found if "@" in name} | {"calibration", "pr_auc"}
    assert undefined == needs_two | (set() if label else needs_clicks)
    assert math.isnan(RankedRows(np.empty(0), np.empty(0)).metrics()["log_loss"])


def test_constant_scores_are_worth_nothing():
    labels = np.array([0, 1, 0, 0, 1.0])
    found = RankedRows(np.full(5, -0.4), labels).metrics()
    assert (found["auc"], found["pr_auc"], found["lift@5%"]) == pytest.approx((0.5, 0.4, 1))


@pytest.mark.parametrize(
    ("logits", "labels", "weights", "message"),
    [
        ([0.0, math.nan], [0, 1], None, "row 1: expected a finite number as its score, got nan"),
        ([0.0, math.inf], [0, 1], None, "row 1: expected a finite number as its score, got inf"),
        ([0.0, 1.0], [0, 2], None, "row 1: expected 0 or 1 as its label, got 2"),
        ([0.0, 1.0], [0, 1, 1], None, r"expected one score, label .* scores \[2\], labels \[3\]"),
        ([0.0, 1.0], [0, 1], [1.0, -1.0], "row 1: .* as its weight, got -1.0"),
        ([0.0, 1.0], [0, 1], [0.0, 0.0], "expected a weight above 0, got 2 zeros"),
        (
            [0.0, 1.0],
            [0, 1],
            [1e308, 1e308],
            "expected weights whose sum is at most 1e.100, got inf",
        ),
    ],
)
def test_rows_that_cannot_be_judged_are_named(logits, labels, weights, message):
    arrays = (None if values is None else np.array(values) for values in (logits, labels, weights))
    with pytest.raises(ValueError, match=message):
        RankedRows(*arrays)
