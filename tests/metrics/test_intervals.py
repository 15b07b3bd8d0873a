"""Intervals match DeLong's published example and a bootstrap of 10,000 replicates."""

import math

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from dlrm.metrics.judged import (
    bootstrap,
    bootstrap_difference,
    delong,
    delong_difference,
    delong_interval,
    percentiles,
)
from dlrm.metrics.ranked import RankedRows

# Ovarian cancer patients (DeLong et al., 1988), as printed in SAS's PROC LOGISTIC manual:
# albumin, total protein, K-G score, and whether surgery helped.
PATIENTS = """
3.0 5.8 10 0 3.2 6.3 5 1 3.9 6.8 3 1 2.8 4.8 6 0 3.2 5.8 3 1 0.9 4.0 5 0 2.5 5.7 8 0 1.6 5.6 5 1
3.8 5.7 5 1 3.7 6.7 6 1 3.2 5.4 4 1 3.8 6.6 6 1 4.1 6.6 5 1 3.6 5.7 5 1 4.3 7.0 4 1 3.6 6.7 4 0
2.3 4.4 6 1 4.2 7.6 4 0 4.0 6.6 6 0 3.5 5.8 6 1 3.8 6.8 7 1 3.0 4.7 8 0 4.5 7.4 5 1 3.7 7.4 5 1
3.1 6.6 6 1 4.1 8.2 6 1 4.3 7.0 5 1 4.3 6.5 4 1 3.2 5.1 5 1 2.6 4.7 6 1 3.3 6.8 6 0 1.7 4.0 7 0
3.7 6.1 5 1 3.3 6.3 7 1 4.2 7.7 6 1 3.5 6.2 5 1 2.9 5.7 9 0 2.1 4.8 7 1 2.8 6.2 8 0 4.0 7.0 7 1
3.3 5.7 6 1 3.7 6.9 5 1 3.6 6.6 5 1
"""


def test_delong_gives_the_published_areas_and_errors():
    albumin, protein, score, label = np.array(PATIENTS.split(), float).reshape(-1, 4).T
    models = [RankedRows(values, label) for values in (10 - score, albumin, protein)]
    areas, covariance = delong(models, label)
    assert areas == pytest.approx([0.7258, 0.7366, 0.6478], abs=5e-5)
    assert np.sqrt(np.diag(covariance)) == pytest.approx([0.1028, 0.0927, 0.1000], abs=5e-5)
    assert delong_difference(models[1], models[0], label) == pytest.approx(
        (0.0108, -0.1761, 0.1976, 0.9102), abs=5e-5
    )
    assert delong_difference(models[2], models[0], label) == pytest.approx(
        (-0.0780, -0.2830, 0.1271, 0.4561), abs=5e-5
    )


def two_models(rows):
    random = np.random.default_rng(0)
    labels = (random.random(rows) < 0.3).astype(float)
    signal = random.normal(0, 1, rows) + 1.1 * labels
    one, other = (signal + random.normal(0, scale, rows) for scale in (0.5, 0.9))
    return np.round(one, 1), np.round(other, 1), labels


def test_delong_agrees_with_a_bootstrap_of_ten_thousand():
    one, other, labels = two_models(400)
    random = np.random.default_rng(1)
    found = []
    ones, others = (RankedRows(scores, labels) for scores in (one, other))
    for _ in range(10_000):
        counts = np.bincount(random.integers(0, 400, 400), minlength=400)
        found.append((ones.metrics(counts)["auc"], others.metrics(counts)["auc"]))
    assert found[0][0] != found[1][0]
    aucs = np.array(found)
    areas, covariance = delong([ones, others], labels)
    assert areas == pytest.approx([roc_auc_score(labels, one), roc_auc_score(labels, other)])
    # 10,000 replicates give a deviation within 0.7 %; DeLong's differs by terms of 1 / rows.
    np.testing.assert_allclose(np.cov(aucs.T), covariance, rtol=0.06)
    difference = delong_difference(ones, others, labels)
    np.testing.assert_allclose(
        np.quantile(aucs[:, 0] - aucs[:, 1], [0.025, 0.975]), difference[1:3], atol=0.002
    )
    _, low, high = delong_interval(ones, labels)
    np.testing.assert_allclose(np.quantile(aucs[:, 0], [0.025, 0.975]), [low, high], atol=0.004)


def test_clusters_widen_the_interval_as_repeated_rows_must():
    """A cluster of four copies of a row carries no more information than the row."""
    one, _, labels = two_models(500)
    repeated, of_repeated, clusters = (np.repeat(a, 4) for a in (one, labels, np.arange(500)))

    def width(scores, known, groups):
        ranked = RankedRows(scores, known)
        measure = lambda counts, _: ranked.metrics(counts)  # noqa: E731
        _, (found,) = bootstrap([measure], groups, len(scores), 400)
        return np.std(found["log_loss"]), np.std(found["auc"])

    once, clustered = width(one, labels, None), width(repeated, of_repeated, clusters)
    np.testing.assert_allclose(clustered, once, rtol=1e-9)  # the same clusters are drawn
    np.testing.assert_allclose(np.divide(width(repeated, of_repeated, None), once), 0.5, rtol=0.15)


def test_both_models_have_the_same_replicates():
    one, other, labels = two_models(300)
    models = [RankedRows(scores, labels) for scores in (one, other, one)]
    measures = [lambda counts, _, m=m: m.metrics(counts) for m in models]
    _, (first, second, third) = bootstrap(measures, None, 300, 200)
    assert (first["rmse"] == third["rmse"]).all()
    difference = bootstrap_difference(0.01, first["auc"], second["auc"])
    assert difference.high - difference.low < np.ptp(first["auc"])
    assert bootstrap_difference(0.0, first["auc"], third["auc"]).p == 1


def test_what_has_no_interval_has_none():
    labels = np.array([0, 0, 0, 1])
    found = delong_interval(RankedRows(np.arange(4.0), labels), labels)
    assert found.value == 1
    assert math.isnan(found.low)
    assert math.isnan(percentiles(math.nan, np.ones(10)).low)
    assert percentiles(1.0, np.empty(0))[0] == 1


def test_bounds_stay_within_what_a_metric_can_be():
    replicates = np.array([0.5, 0.9, 0.94, 1.0, 1.0])
    assert percentiles(0.99, replicates).high > 1
    assert percentiles(0.99, replicates, most=1.0).high == 1
    assert percentiles(0.02, np.array([0.0, 0.3, 0.4])).low == 0
