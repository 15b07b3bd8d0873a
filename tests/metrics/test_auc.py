"""AUC on one device, over real processes and within groups, with scikit-learn as the oracle."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from ranks import Ranks
from sklearn.metrics import roc_auc_score

from dlrm.metrics.clicks import roc_auc
from dlrm.metrics.judged import ScoredRows, judge
from dlrm.metrics.ranked import RankedRows

EXACT = 1e-12  # both sides are ratios of integers below 2**53; only the last division rounds


@pytest.fixture(scope="module", params=[2, 3, 4], name="ranks")
def ranks_of_each_size(request):
    with Ranks(request.param) as ranks:
        yield ranks


def roc_auc_of(world, scores, labels, weights=None):
    return roc_auc(scores, labels, world, weights)


def over(ranks, parts, *columns):
    """Returns the AUC of rows divided among ranks by `parts`; checks that all agree."""
    own = [[column[parts == rank] for column in columns] for rank in range(ranks.size)]
    first, *others = ranks.call(roc_auc_of, own)
    assert all(str(other) == str(first) for other in others)
    return first


def check(found, scores, labels, weights=None):
    counted = labels if weights is None else labels[weights > 0]
    if len(counted.unique()) < 2:
        assert math.isnan(found)
    else:
        finite = scores.double().clamp(-1e9, 1e9)  # scikit-learn refuses infinite scores
        expected = roc_auc_score(labels, finite, sample_weight=weights)
        assert abs(found - expected) < EXACT


ROWS = st.tuples(
    st.sampled_from([-math.inf, -1.5, -0.0, 0.0, 1e-30, 2.0, math.inf]),
    st.booleans(),
    st.sampled_from([0.0, 0.1, 1.0, 7.5]),
    st.integers(0, 3),
)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow), 4], indirect=True)
@settings(max_examples=25)
@given(rows=st.lists(ROWS, max_size=50))
def test_ties_empty_ranks_and_one_class_count_as_in_scikit_learn(ranks, rows):
    scores, labels, weights, parts = torch.tensor(rows).reshape(-1, 4).unbind(1)
    parts = parts % ranks.size
    found = over(ranks, parts, scores, labels)
    assert str(found) == str(roc_auc(scores, labels))  # the same bits as one process
    check(found, scores, labels)
    check(over(ranks, parts, scores, labels, weights), scores, labels, weights)
    check(roc_auc(scores, labels, weights=weights), scores, labels, weights)


def rows_of(kind, count):
    random = torch.Generator().manual_seed(1)
    labels = (torch.rand(count, generator=random) < 0.2).float()
    scores = torch.randn(count, generator=random) + labels
    kinds = {
        "distinct": scores,
        "float64": scores.double() + 1e-9,
        "bfloat16": scores.bfloat16(),
        "float16": scores.half(),
        "all tied": torch.zeros(count),
        "many frequent values": (scores * 40).round(),
        "separated": labels - 0.5,
        "one outlier": torch.where(torch.arange(count) == 7, 1e30, -0.0),
    }
    weights = torch.rand(count, generator=random) * 3
    weights[::3] = 0
    return kinds[kind], labels, weights.double()


KINDS = ("distinct", "float64", "bfloat16", "all tied", "many frequent values", "separated")


@pytest.mark.parametrize("kind", [*KINDS, "float16", "one outlier"])
def test_many_rows_of_every_dtype_and_mostly_positive_ones(kind, device):
    scores, labels, weights = (column.to(device) for column in rows_of(kind, 100_000))
    for label in (labels, 1 - labels):
        check(roc_auc(scores, label), scores.cpu(), label.cpu())
        found = roc_auc(scores, label, weights=weights)
        check(found, scores.cpu(), label.cpu(), weights.cpu())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dealt", ["by turns", "in blocks of other sizes", "by label", "to one"])
def test_ranks_agree_with_one_process(ranks, kind, dealt):
    scores, labels, weights = rows_of(kind, 10_000)
    rows = np.arange(len(scores))
    parts = {
        "by turns": rows % ranks.size,
        "in blocks of other sizes": np.minimum(ranks.size - 1, (rows / len(rows)) ** 2 * 5) // 1,
        "by label": np.where(labels.numpy() == 1, 0, 1 + rows % (ranks.size - 1)),
        "to one": np.full(len(rows), ranks.size - 1),
    }[dealt]
    assert over(ranks, parts, scores, labels) == roc_auc(scores, labels)
    check(over(ranks, parts, scores, labels, weights), scores, labels, weights)


def test_known_answer(device):
    scores = torch.tensor([0.1, 0.4, 0.35, 0.8], device=device)
    labels = torch.tensor([0, 0, 1, 1], device=device)
    assert roc_auc(scores, labels) == 0.75
    assert roc_auc(-scores, labels) == 0.25


def test_counts_are_exact_where_float32_sums_are_not(device):
    # 2**25 + 1 negatives: a float32 running count stops at 2**24
    negatives = 2**25 + 1
    scores = torch.cat([torch.zeros(negatives, dtype=torch.float16), torch.tensor([1.0, -1.0])])
    labels = torch.cat([torch.zeros(negatives), torch.ones(2)])
    assert roc_auc(scores.to(device), labels.to(device)) == 0.5


def check_groups(scores, labels, clusters, weights):
    """Compares with scikit-learn, group by group, leaving out those of one class."""
    expected = []
    for number in np.unique(clusters):
        here = clusters == number
        weight, label = weights[here], labels[here]
        if 0 < (weight * label).sum() < weight.sum():
            auc = roc_auc_score(label, scores[here], sample_weight=weight)
            expected.append((number, auc, weight.sum(), (weight * label).sum()))
    found = RankedRows(scores, labels, weights).within_groups(clusters)
    by_rows, by_clicks = found.means(np.ones(clusters.max(initial=-1) + 1)).values()
    if not expected:
        assert math.isnan(by_rows)
        assert math.isnan(by_clicks)
        return
    numbers, aucs, rows, clicks = zip(*expected, strict=True)
    assert (found.number.tolist(), found.rows.tolist()) == ([*numbers], [*rows])
    np.testing.assert_allclose(found.auc, aucs, rtol=1e-12)
    assert by_rows == pytest.approx(np.average(aucs, weights=rows), rel=1e-12)
    assert by_clicks == pytest.approx(np.average(aucs, weights=clicks), rel=1e-12)


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans(), st.integers(0, 6)), max_size=50))
def test_ties_within_groups(rows):
    scores, labels, clusters = np.array(rows, np.float32).reshape(-1, 3).T
    for weights in (np.ones(len(rows)), np.arange(1, len(rows) + 1) % 3 / 2):  # also of weight 0
        check_groups(scores, labels, clusters.astype(np.int64), weights)


def test_many_rows_of_unequal_groups():
    random = np.random.default_rng(0)
    groups = (random.pareto(1.0, 30_000) * 20).astype(np.int64) % 2000
    labels = (random.random(30_000) < 0.2).astype(np.float32)
    scores = (random.normal(0, 1, 30_000) + labels).astype(np.float32)
    scores[::7] = -0.0
    scores[::11] = 0.0
    for weights in (np.ones(30_000), random.integers(0, 3, 30_000) / 4):
        check_groups(scores, labels, groups, weights)


@pytest.mark.parametrize("first", [np.uint64(2**63), np.int64(-(2**63)), np.uint64(2**64 - 3)])
def test_groups_may_have_any_numbers(first):
    labels, scores = np.array([0, 1, 0, 1, 1.0]), np.array([1, 2, 4, 3, 0.0], np.float32)
    groups = first + np.array([0, 0, 2, 2, 0], first.dtype)
    (found,) = judge(ScoredRows((scores,), labels, groups=groups), 0).models
    assert found["gauc_by_impressions"].value == (3 * 0.5 + 2 * 0) / 5
    assert found["gauc_by_clicks"].value == (2 * 0.5 + 1 * 0) / 3
