"""Metrics, with scikit-learn as the oracle."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from dlrm.metrics.clicks import click_metrics, fraction_metrics, roc_auc

# Both sides are ratios of integers below 2**53; only the last division rounds.
EXACT = 1e-12


def test_known_answer(device):
    scores = torch.tensor([0.1, 0.4, 0.35, 0.8], device=device)
    labels = torch.tensor([0, 0, 1, 1], device=device)
    assert roc_auc(scores, labels) == 0.75
    assert roc_auc(-scores, labels) == 0.25


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=60))
def test_ties_count_as_in_scikit_learn(rows):
    scores = torch.tensor([float(score) for score, _ in rows])
    labels = torch.tensor([float(label) for _, label in rows])
    if len(labels.unique()) < 2:
        assert math.isnan(roc_auc(scores, labels))
    else:
        assert abs(roc_auc(scores, labels) - roc_auc_score(labels, scores)) < EXACT


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_many_rows_of_every_dtype(dtype, device):
    random = torch.Generator().manual_seed(0)
    labels = (torch.rand(200_000, generator=random) < 0.03).float()
    scores = (torch.randn(200_000, generator=random) + labels).to(dtype)
    expected = roc_auc_score(labels.numpy(), scores.double().numpy())
    assert abs(roc_auc(scores.to(device), labels.to(device)) - expected) < EXACT


def test_ties_infinities_and_one_class(device):
    infinite = [-math.inf, -1.0, -0.0, 0.0, 0.0, 2.0, math.inf, math.inf]
    labels = torch.tensor([0, 1, 0, 1, 0, 0, 1, 0], device=device)
    scores = torch.tensor(infinite, device=device)
    expected = roc_auc_score(labels.cpu(), scores.clamp(-9, 9).cpu())
    assert abs(roc_auc(scores, labels) - expected) < EXACT
    assert math.isnan(roc_auc(scores, torch.ones_like(labels)))


def test_counts_are_exact_where_float32_sums_are_not(device):
    # 2**25 + 1 negatives: a float32 running count stops at 2**24
    negatives = 2**25 + 1
    scores = torch.cat([torch.zeros(negatives, dtype=torch.float16), torch.tensor([1.0, -1.0])])
    labels = torch.cat([torch.zeros(negatives), torch.ones(2)])
    assert roc_auc(scores.to(device), labels.to(device)) == 0.5


def test_the_loss_of_fractions_is_their_cross_entropy(device):
    random = np.random.default_rng(0)
    logits, targets = random.normal(0, 2, 5000), random.random(5000)
    rows = (torch.tensor(values, device=device) for values in (logits, targets))
    chances = 1 / (1 + np.exp(-logits))
    # A target t counts as t clicks and 1 - t rows without one.
    both = np.repeat([1, 0], 5000), np.tile(chances, 2)
    expected = log_loss(*both, sample_weight=np.concatenate([targets, 1 - targets]))
    assert fraction_metrics(*rows) == {"log_loss": pytest.approx(expected, rel=1e-12)}
    broken = torch.tensor([math.inf, 1.0]), torch.tensor([0.5, 0.5])
    assert math.isnan(fraction_metrics(*broken)["log_loss"])
    with pytest.raises(ValueError, match=r"expected scores and labels \[n\]"):
        fraction_metrics(torch.zeros(3), torch.zeros(2))


def test_all_metrics_are_those_of_scikit_learn(device):
    random = np.random.default_rng(0)
    logits = random.normal(-1, 2, 10_000)
    labels = random.random(10_000) < 0.2
    probabilities = 1 / (1 + np.exp(-logits))
    rows = (torch.tensor(values, device=device).float() for values in (logits, labels))
    found = click_metrics(*rows)
    base = log_loss(labels, np.full(10_000, labels.mean()))
    assert found == pytest.approx(
        {
            "auc": roc_auc_score(labels, logits),
            "log_loss": log_loss(labels, probabilities),
            "normalized_entropy": log_loss(labels, probabilities) / base,
            "calibration": probabilities.mean() / labels.mean(),
        },
        rel=1e-6,  # the logits were rounded to float32
    )


@pytest.mark.parametrize(
    ("scores", "labels", "message"),
    [
        ([0.1, math.nan], [0, 1], "a score is NaN"),
        ([0.1, 0.2], [0, 2], "expected labels 0 and 1"),
        ([0.1, 0.2], [0], r"\[2\] and \[1\]"),
    ],
)
def test_impossible_input_is_refused(scores, labels, message, device):
    with pytest.raises(ValueError, match=message):
        roc_auc(torch.tensor(scores, device=device), torch.tensor(labels, device=device))


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.integers(-3, 3), st.booleans(), st.sampled_from([0.0, 0.1, 1.0, 7.5])),
        min_size=1,
        max_size=60,
    )
)
def test_weighted_ties_count_as_in_scikit_learn(rows):
    scores, labels, weights = (torch.tensor(column).double() for column in zip(*rows, strict=True))
    counted = weights > 0
    if len(labels[counted].unique()) < 2:
        assert math.isnan(roc_auc(scores, labels, weights=weights))
    else:
        expected = roc_auc_score(labels, scores, sample_weight=weights)
        assert abs(roc_auc(scores, labels, weights=weights) - expected) < EXACT


def test_all_weighted_metrics_are_those_of_scikit_learn(device):
    random = np.random.default_rng(0)
    logits = random.normal(-1, 2, 10_000).astype(np.float32)
    labels = random.random(10_000) < 0.2
    weights = np.where(random.random(10_000) < 0.3, 0, random.exponential(size=10_000)).astype("f4")
    rows = [torch.tensor(values, device=device).float() for values in (logits, labels)]
    found = click_metrics(*rows, weights=torch.tensor(weights, device=device))
    probabilities = 1 / (1 + np.exp(-logits.astype(np.float64)))
    kept = {"sample_weight": weights.astype(np.float64)}
    base = log_loss(labels, np.full(10_000, np.average(labels, weights=weights)), **kept)
    loss = log_loss(labels, probabilities, **kept)
    assert found == pytest.approx(
        {
            "auc": roc_auc_score(labels, logits, **kept),
            "log_loss": loss,
            "normalized_entropy": loss / base,
            "calibration": np.average(probabilities, weights=weights)
            / np.average(labels, weights=weights),
        },
        rel=1e-9,
    )
    assert fraction_metrics(*rows, weights=torch.tensor(weights, device=device)) == {
        "log_loss": found["log_loss"]
    }
