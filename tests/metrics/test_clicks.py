"""Metrics of tests during training, with scikit-learn as the oracle."""

import math
import re

import numpy as np
import pytest
import torch
from ranks import Ranks
from sklearn.metrics import log_loss, roc_auc_score

from dlrm.distributed import OtherRankError, World
from dlrm.metrics.clicks import click_metrics, fraction_metrics


@pytest.fixture(scope="module", name="ranks")
def three_ranks():
    with Ranks(3) as ranks:
        yield ranks


def rows_of(count, weighted):
    """Returns logits, labels and, if requested, weights, some of which are 0."""
    random = np.random.default_rng(0)
    logits = random.normal(-1, 2, count).astype(np.float32)
    labels = (random.random(count) < 0.2).astype(np.float32)
    weights = np.where(random.random(count) < 0.3, 0, random.exponential(size=count))
    return [*map(torch.from_numpy, (logits, labels))] + weighted * [torch.from_numpy(weights)]


def click_metrics_of(world, logits, labels, weights=None):
    return click_metrics(logits, labels, world, weights)


def fraction_metrics_of(world, logits, labels, weights=None):
    return fraction_metrics(logits, labels, world, weights)


@pytest.mark.parametrize("weighted", [False, True])
def test_all_metrics_are_those_of_scikit_learn(weighted, device):
    rows = rows_of(10_000, weighted)
    logits, labels, *weights = (column.double().numpy() for column in rows)
    kept = {"sample_weight": weights[0] if weighted else np.ones(10_000)}
    probabilities = 1 / (1 + np.exp(-logits))
    rate = np.average(labels, weights=kept["sample_weight"])
    loss = log_loss(labels, probabilities, **kept)
    on_device = [column.to(device) for column in rows]
    found = click_metrics_of(World(), *on_device)
    assert found == pytest.approx(
        {
            "auc": roc_auc_score(labels, logits, **kept),
            "log_loss": loss,
            "normalized_entropy": loss / log_loss(labels, np.full(10_000, rate), **kept),
            "calibration": np.average(probabilities, weights=kept["sample_weight"]) / rate,
        },
        rel=1e-9,
    )
    loss = fraction_metrics_of(World(), *on_device)
    assert loss == {"log_loss": found["log_loss"]}


@pytest.mark.parametrize("weighted", [False, True])
def test_ranks_have_the_metrics_of_one_process(ranks, weighted):
    rows = rows_of(9000, weighted)
    parts = np.arange(9000) % 2  # the last rank has none
    own = [[column[parts == rank] for column in rows] for rank in range(3)]
    first, *others = ranks.call(click_metrics_of, own)
    assert all(other == first for other in others)
    alone = click_metrics(*rows[:2], weights=rows[2] if weighted else None)
    assert first == pytest.approx(alone, rel=1e-12)
    own[0][0][3] = math.nan
    for found in ranks.call(click_metrics_of, own):
        assert all(map(math.isnan, found.values()))


def test_equal_weights_change_nothing():
    logits, labels = rows_of(9000, False)
    weighted = click_metrics(logits, labels, weights=torch.full_like(labels, 0.5))
    assert weighted == pytest.approx(click_metrics(logits, labels), rel=1e-12)


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


GOOD = ([0.5, 0.25], [1.0, 0.0], [1.0, 1.0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (([0.1, 0.2], [0.0, 2.0], [1.0, 1.0]), "expected labels 0 and 1"),
        (([0.1, 0.2], [0.0], [1.0]), r"expected scores and labels \[n\], got \[2\] and \[1\]"),
        (([0.1, 0.2], [0.0, 1.0], [1.0, -1.0]), "expected weights of 0 or more"),
        (([0.1, 0.2], [0.0, 1.0], [1.0, math.nan]), "expected weights of 0 or more"),
        (([0.1, 0.2], [0.0, 1.0], [1.0]), r"expected weights \[2\], got \[1\]"),
    ],
)
def test_what_one_rank_cannot_take_all_refuse_and_name(ranks, wrong, message):
    for function in (click_metrics_of, fraction_metrics_of):
        if "labels 0" in message and function is fraction_metrics_of:
            continue
        own = [[*map(torch.tensor, wrong if rank == 1 else GOOD)] for rank in range(3)]
        first, second, third = ranks.call(function, own)
        assert isinstance(second, ValueError)
        assert re.match(f"rank 1: {message}", str(second))
        assert isinstance(first, OtherRankError) and isinstance(third, OtherRankError)  # noqa: PT018
    good = ranks.call(click_metrics_of, [[*map(torch.tensor, GOOD)]] * 3)
    assert [found["auc"] for found in good] == [1.0] * 3  # ranks go on


def test_only_weights_of_zero_are_refused(ranks):
    own = [(torch.ones(2), torch.tensor([1.0, 0.0]), torch.zeros(2))] * 3
    first, *others = ranks.call(click_metrics_of, own)
    assert "expected sample weights above 0, got 6 zeros" in str(first)
    assert all(isinstance(error, OtherRankError) for error in others)
