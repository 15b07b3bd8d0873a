"""AUC over real processes, with scikit-learn as the oracle."""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from ranks import Ranks
from sklearn.metrics import roc_auc_score

from dlrm.distributed import OtherRankError
from dlrm.metrics.clicks import click_metrics, roc_auc

SIZES = (2, 3, 4)
EXACT = 1e-12  # both sides are ratios of integers below 2**53; only the last division rounds


@pytest.fixture(scope="module", params=SIZES, name="ranks")
def ranks_of_each_size(request):
    with Ranks(request.param) as ranks:
        yield ranks


def over(ranks, scores, labels, parts=None):
    """Returns the AUC of rows divided among ranks by `parts`; checks that all agree."""
    if parts is None:
        parts = np.arange(len(scores)) % ranks.size
    own = [(scores[parts == rank], labels[parts == rank]) for rank in range(ranks.size)]
    areas = ranks.call(roc_auc_of, own)
    alone = roc_auc(scores, labels)
    assert [*map(str, areas)] == [str(alone)] * ranks.size  # the same bits as one process
    return alone


def check(ranks, scores, labels, parts=None):
    found = over(ranks, scores, labels, parts)
    if len(labels.unique()) < 2:
        assert math.isnan(found)
    else:
        expected = roc_auc_score(labels.numpy(), scores.double().numpy())
        assert abs(found - expected) < EXACT


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow), 4], indirect=True)
@settings(max_examples=25)
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from([-math.inf, -1.5, -0.0, 0.0, 1e-30, 2.0, math.inf]),
            st.booleans(),
            st.integers(0, 3),
        ),
        max_size=50,
    )
)
def test_ties_empty_ranks_and_one_class_count_as_in_scikit_learn(ranks, rows):
    scores = torch.tensor([score for score, _, _ in rows])
    labels = torch.tensor([float(label) for _, label, _ in rows])
    parts = np.array([part % ranks.size for *_, part in rows], dtype=np.int64)
    found = over(ranks, scores, labels, parts)
    if len(labels.unique()) < 2:
        assert math.isnan(found)
    else:
        finite = scores.clamp(-9, 9)  # scikit-learn refuses infinite scores
        assert abs(found - roc_auc_score(labels, finite.double())) < EXACT


def rows_of(kind, count=40_000):
    random = torch.Generator().manual_seed(1)
    labels = (torch.rand(count, generator=random) < 0.2).float()
    scores = torch.randn(count, generator=random) + labels
    mixed = torch.rand(count, generator=random)
    kinds = {
        "distinct": scores,
        "float64": scores.double() + 1e-9,
        "bfloat16": scores.bfloat16(),
        "sorted": scores.sort().values,
        "all tied": torch.zeros(count),
        "half tied": torch.where(mixed < 0.5, torch.tensor(0.25), scores),
        "few values": (scores * 2).round(),
        "many frequent values": (scores * 40).round(),
        "separated": labels - 0.5,
        "one outlier": torch.where(
            torch.arange(count) == 7, torch.tensor(1e30), torch.tensor(-0.0)
        ),
    }
    return kinds[kind], labels


KINDS = (
    *("distinct", "float64", "bfloat16", "sorted", "all tied", "half tied", "few values"),
    *("many frequent values", "separated", "one outlier"),
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dealt", ["by turns", "in blocks of other sizes", "by label", "to one"])
def test_ranks_agree_with_scikit_learn(ranks, kind, dealt):
    scores, labels = rows_of(kind)
    rows = np.arange(len(scores))
    parts = {
        "by turns": rows % ranks.size,
        "in blocks of other sizes": np.minimum(ranks.size - 1, (rows / len(rows)) ** 2 * 5).astype(
            int
        ),
        "by label": np.where(labels.numpy() == 1, 0, 1 + rows % (ranks.size - 1)),
        "to one": np.full(len(rows), ranks.size - 1),
    }
    check(ranks, scores, labels, parts[dealt])


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_one_class_is_nan(ranks, label):
    assert math.isnan(over(ranks, torch.randn(20), torch.full((20,), label)))


def test_no_rows_are_nan(ranks):
    assert math.isnan(over(ranks, torch.empty(0), torch.empty(0)))


@pytest.mark.parametrize(
    ("scores", "labels", "message"),
    [
        ([0.1, math.nan], [0, 1], "a score is NaN"),
        ([0.1, 0.2], [0, 2], "expected labels 0 and 1"),
        ([0.1, 0.2], [0], r"expected scores and labels \[n\], got \[2\] and \[1\]"),
    ],
)
def test_what_one_rank_cannot_take_all_refuse_and_name(ranks, scores, labels, message):
    wrong = (torch.tensor(scores), torch.tensor(labels))
    good = (torch.tensor([0.5, 0.25]), torch.tensor([1, 0]))
    for function in (roc_auc_of, click_metrics_of):
        own = [wrong if rank == 1 else good for rank in range(ranks.size)]
        if function is click_metrics_of and "NaN" in message:
            continue  # NaN is a result there
        for rank, error in enumerate(ranks.call(function, own)):
            assert isinstance(error, ValueError if rank == 1 else OtherRankError)
            if rank == 1:
                assert re.match(rf"rank 1: {message}", str(error))
    assert ranks.call(roc_auc_of, [good] * ranks.size) == [1.0] * ranks.size  # ranks go on


def roc_auc_of(world, scores, labels):
    return roc_auc(scores, labels, world)


def click_metrics_of(world, logits, labels):
    return click_metrics(logits, labels, world)


def test_all_metrics_are_those_of_one_process(ranks):
    scores, labels = rows_of("distinct")
    parts = np.arange(len(scores)) % (ranks.size - 1)  # the last rank has none
    own = [(scores[parts == rank], labels[parts == rank]) for rank in range(ranks.size)]
    first, *others = ranks.call(click_metrics_of, own)
    assert all(other == first for other in others)
    assert first == pytest.approx(click_metrics(scores, labels), rel=1e-12)
    own[0][0][3] = math.nan
    for found in ranks.call(click_metrics_of, own):
        assert all(map(math.isnan, found.values()))


def weighted_of(world, *rows):
    return (roc_auc(*rows[:2], world, rows[2]), click_metrics(*rows[:2], world, rows[2]))


def over_weighted(ranks, scores, labels, weights, parts):
    own = [[column[parts == rank] for column in (scores, labels, weights)] for rank in range(4)]
    results = ranks.call(weighted_of, own[: ranks.size])
    assert all(str(result) == str(results[0]) for result in results)
    return results[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dealt", ["by turns", "by score", "to one"])
def test_weighted_pairs_count_as_in_scikit_learn_on_any_number_of_ranks(ranks, kind, dealt):
    scores, labels = rows_of(kind, 10_000)
    random = torch.Generator().manual_seed(2)
    weights = torch.rand(len(labels), generator=random) * 3
    weights[::3] = 0
    rows = np.arange(len(labels))
    parts = {
        "by turns": rows % ranks.size,
        "by score": scores.double().argsort().argsort().numpy() * ranks.size // len(rows),
        "to one": np.full(len(rows), ranks.size - 1),
    }[dealt]
    area, metrics = over_weighted(ranks, scores, labels, weights, parts)
    finite = scores.double().clamp(-1e9, 1e9)
    expected = roc_auc_score(labels, finite, sample_weight=weights.double())
    assert abs(area - expected) < EXACT
    assert abs(roc_auc(scores, labels, weights=weights) - expected) < EXACT
    alone = click_metrics(scores, labels, weights=weights)
    assert metrics == pytest.approx(alone, rel=1e-12)


def test_equal_weights_change_nothing(ranks):
    scores, labels = rows_of("many frequent values")
    weights, parts = torch.full_like(labels, 0.5), np.arange(len(labels)) % ranks.size
    _, metrics = over_weighted(ranks, scores, labels, weights, parts)
    assert metrics == pytest.approx(click_metrics(scores, labels), rel=1e-12)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, -1.0], "expected weights of 0 or more"),
        ([1.0, math.nan], "expected weights of 0 or more"),
        ([1.0], r"expected weights \[2\], got \[1\]"),
    ],
)
def test_weights_that_are_none_are_refused_on_all_ranks(ranks, weights, message):
    scores, labels = torch.tensor([0.5, 0.25]), torch.tensor([1, 0])
    own = [
        (scores, labels, torch.tensor(weights if rank == 1 else [1.0, 0.0]))
        for rank in range(ranks.size)
    ]
    for rank, error in enumerate(ranks.call(weighted_of, own)):
        assert isinstance(error, ValueError if rank == 1 else OtherRankError)
        assert rank != 1 or re.match(rf"rank 1: {message}", str(error))


def test_only_weights_of_zero_are_refused(ranks):
    own = [(torch.ones(2), torch.tensor([1.0, 0.0]), torch.zeros(2))] * ranks.size
    errors = ranks.call(weighted_of, own)
    count = 2 * ranks.size
    assert f"expected sample weights above 0, got {count} zeros" in str(errors[0])
    assert all(isinstance(error, OtherRankError) for error in errors[1:])
