"""Metrics of a test during training: of logits on the device, and over ranks."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dlrm.distributed import World, agreed, gather
from dlrm.metrics.auc import Side, ordered_pairs
from dlrm.metrics.ranked import metrics_of_sums
from dlrm.metrics.table import TESTED

_ROWS_AT_ONCE = 1 << 20  # in float64


def click_metrics(
    logits: Tensor, labels: Tensor, world: World = World(), weights: Tensor | None = None
) -> dict[str, float]:
    """Returns the metrics of a test set, over the rows of all ranks, on every rank.

    Args:
        logits: `[n]`.
        labels: `[n]`, 0 or 1.
        world: the processes; each has its own rows, any number of them or none.
        weights: `[n]`, 0 or more, on every rank or on none; None is 1 for each row.

    Returns:
        `auc`; `log_loss` in nats; `normalized_entropy`, the log loss relative to that of always
        predicting the click rate (He et al., 2014); `calibration`, predicted over observed clicks.
        All are NaN without rows, or if a logit is NaN or infinite.

    Raises:
        ValueError: shapes differ, a label is neither 0 nor 1, a weight is not a number of 0 or
            more, or all weights are 0. Only the first such rank raises it.
        OtherRankError: another rank raises it.
    """
    rows, loss, clicks, predicted = _sums(logits, labels, world, weights, are_clicks=True)
    if not rows or not math.isfinite(loss):
        return dict.fromkeys(TESTED, math.nan)
    area = roc_auc(logits.float(), labels, world, weights)
    return {"auc": area, **metrics_of_sums(rows, loss, clicks, predicted)}


def fraction_metrics(
    logits: Tensor, targets: Tensor, world: World = World(), weights: Tensor | None = None
) -> dict[str, float]:
    """Returns `log_loss`, the mean binary cross-entropy, of a test set of fractions from 0 to 1.

    Arguments, NaN and errors are those of `click_metrics`.
    """
    rows, loss, *_ = _sums(logits, targets, world, weights, are_clicks=False)
    return {"log_loss": loss / rows if rows and math.isfinite(loss) else math.nan}


def roc_auc(
    scores: Tensor, labels: Tensor, world: World = World(), weights: Tensor | None = None
) -> float:
    """Returns the exact area under the ROC curve of the rows of all ranks, on every rank.

    Each rank counts the pairs of its negatives and the positives of all ranks. Without weights the
    result has the same bits on any number of ranks. It is NaN if there are only positives or only
    negatives.

    Args:
        scores: `[n]`, any floating dtype, without NaN; logits and probabilities give the same.
        labels, world, weights: as `click_metrics` checks them.
    """
    negatives, positives = (_side(scores, labels == label, weights) for label in (0, 1))
    facts = gather((negatives.total, positives), world)
    pairs = sum(fact[0] for fact in facts) * sum(fact[1].total for fact in facts)
    if not pairs:
        return math.nan
    ordered = sum(ordered_pairs(negatives, theirs) for _, theirs in facts)
    return sum(gather(ordered, world)) / (2 * pairs)


def _side(scores: Tensor, chosen: Tensor, weights: Tensor | None) -> Side:
    scores = scores.detach()
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if scores.is_cuda:
        values, order = scores[chosen].sort()
        own = None if weights is None else weights[chosen][order].double().cpu().numpy()
        return Side(values.cpu().numpy(), own)
    found = np.compress(chosen.numpy(), scores.numpy())  # several times as fast as in torch
    if weights is None:
        found.sort()
        return Side(found)
    places = found.argsort()
    return Side(found[places], np.compress(chosen.numpy(), weights.double().numpy())[places])


def _sums(
    logits: Tensor, labels: Tensor, world: World, weights: Tensor | None, are_clicks: bool
) -> tuple[float, float, float, float]:
    """Returns the sums, over all ranks, of weights and weighted losses, labels and predictions."""
    with agreed(world, ValueError):
        _check(logits, labels, weights, are_clicks)
    parts = []
    for begin in range(0, max(len(logits), 1), _ROWS_AT_ONCE):
        part = slice(begin, begin + _ROWS_AT_ONCE)
        x, y = logits[part].double(), labels[part].double()
        weight = torch.ones_like(x) if weights is None else weights[part].double()
        losses = F.binary_cross_entropy_with_logits(x, y, reduction="none")
        columns = weight, losses * weight, y * weight, x.sigmoid() * weight
        parts.append(torch.stack([column.sum() for column in columns]))
    facts = gather((torch.stack(parts).sum(0).tolist(), len(labels)), world)
    rows, loss, clicks, predicted = map(sum, zip(*(sums for sums, _ in facts), strict=True))
    with agreed(world, ValueError):
        if not rows and (count := sum(number for _, number in facts)):
            raise ValueError(f"expected sample weights above 0, got {count:,} zeros")
    return rows, loss, clicks, predicted


def _check(scores: Tensor, labels: Tensor, weights: Tensor | None, are_clicks: bool) -> None:
    if scores.ndim != 1 or scores.shape != labels.shape:
        shapes = f"{list(scores.shape)} and {list(labels.shape)}"
        raise ValueError(f"expected scores and labels [n], got {shapes}")
    if weights is not None and weights.shape != labels.shape:
        raise ValueError(f"expected weights {list(labels.shape)}, got {list(weights.shape)}")
    if weights is not None and not (weights.isfinite() & (weights >= 0)).all():
        raise ValueError("expected weights of 0 or more")
    if are_clicks and not ((labels == 1) | (labels == 0)).all():
        raise ValueError("expected labels 0 and 1")
