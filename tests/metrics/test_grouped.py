"""Grouped AUC, with scikit-learn group by group as the oracle."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from sklearn.metrics import roc_auc_score

from dlrm.metrics.auc import within_groups


def of_each_group(scores, labels, groups, weights):
    """Yields (number, AUC, rows, clicks) of each group with both classes."""
    for number in sorted(set(groups.tolist())):
        here = groups == number
        weight, label = weights[here], labels[here]
        if 0 < (weight * label).sum() < weight.sum():
            auc = roc_auc_score(label, scores[here], sample_weight=weight)
            yield number, auc, weight.sum(), (weight * label).sum()


def check(scores, labels, groups, weights=None):
    ones = np.ones(len(scores)) if weights is None else weights
    expected = list(of_each_group(scores, labels, groups, ones))
    numbers, clusters = np.unique(groups, return_inverse=True)
    found = within_groups(scores, labels, clusters, ones)
    assert numbers[found.number].tolist() == [number for number, *_ in expected]
    assert found.rows.tolist() == [rows for _, _, rows, _ in expected]
    by_rows, by_clicks = found.means(np.ones(len(numbers))).values()
    if not expected:
        assert math.isnan(by_rows)
        assert math.isnan(by_clicks)
        return
    numbers, aucs, rows, clicks = zip(*expected, strict=True)
    np.testing.assert_allclose(found.auc, aucs, rtol=1e-12)
    assert by_rows == pytest.approx(np.average(aucs, weights=rows), rel=1e-12)
    assert by_clicks == pytest.approx(np.average(aucs, weights=clicks), rel=1e-12)


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(-3, 3), st.booleans(), st.integers(0, 6)), max_size=50),
    st.sampled_from([1, 1 << 28]),
)
def test_ties_and_groups_of_any_numbers(rows, spread):
    scores, labels, groups = (np.array([row[i] for row in rows]) for i in range(3))
    arrays = scores.astype(np.float32), labels.astype(float), groups.astype(np.int64) * spread
    check(*arrays)
    if len(rows):  # whole groups may have weight 0
        check(*arrays, np.array([1, *(index % 3 / 2 for index in range(1, len(rows)))]))


def test_many_rows_of_unequal_groups():
    random = np.random.default_rng(0)
    groups = (random.pareto(1.0, 30_000) * 20).astype(np.int64) % 2000
    labels = (random.random(30_000) < 0.2).astype(np.float32)
    scores = (random.normal(0, 1, 30_000) + labels).astype(np.float32)
    scores[::7] = -0.0
    scores[::11] = 0.0
    check(scores, labels, groups)
    check(scores, labels, groups, random.integers(0, 3, 30_000) / 4)
