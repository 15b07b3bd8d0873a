"""Metrics of a test during training: sums over logits on the device, and over ranks."""

import math

import torch
from torch import Tensor

from dlrm.distributed import World, gather
from dlrm.metrics.auc import raise_problems, roc_auc, shape_problem, weights_problem
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
    rows, loss, clicks, predicted = _sums_of_all("click_metrics", logits, labels, world, weights)
    if not rows or not math.isfinite(loss):
        return dict.fromkeys(TESTED, math.nan)
    area = roc_auc(logits.float(), labels, world, weights)
    return {"auc": area, **metrics_of_sums(rows, loss, clicks, predicted)}


def fraction_metrics(
    logits: Tensor, targets: Tensor, world: World = World(), weights: Tensor | None = None
) -> dict[str, float]:
    """Returns the metrics of a test set whose targets are fractions.

    Args:
        logits: `[n]`.
        targets: `[n]`, from 0 to 1.
        world: the processes that have rows, as in `click_metrics`.
        weights: as in `click_metrics`.

    Returns:
        `log_loss` in nats, the mean binary cross-entropy; NaN as in `click_metrics`.
    """
    rows, loss, *_ = _sums_of_all("fraction_metrics", logits, targets, world, weights)
    return {"log_loss": loss / rows if rows and math.isfinite(loss) else math.nan}


def _sums_of_all(
    operation: str, logits: Tensor, labels: Tensor, world: World, weights: Tensor | None
) -> tuple[float, float, float, float]:
    """Returns `_sums` over the rows of all ranks."""
    problem = shape_problem(logits, labels) or weights_problem(weights, labels)
    own = (0, 0.0, 0.0, 0.0) if problem else _sums(logits, labels, weights)
    facts = gather((problem, own, len(labels)), world)
    raise_problems(operation, [fact[0] for fact in facts], world.rank)
    rows, losses, clicks, predicted = zip(*(sums for _, sums, _ in facts), strict=True)
    if weights is not None and not sum(rows) and (count := sum(fact[2] for fact in facts)):
        none = f"expected sample weights above 0, got {count:,} zeros"
        raise_problems(operation, [none] * world.size, world.rank)
    return sum(rows), sum(losses), sum(clicks), sum(predicted)


def _sums(
    logits: Tensor, labels: Tensor, weights: Tensor | None
) -> tuple[float, float, float, float]:
    """Returns rows, or their weights, and sums of losses, labels and predicted probabilities."""
    parts = []
    for begin in range(0, max(len(logits), 1), _ROWS_AT_ONCE):
        part = slice(begin, begin + _ROWS_AT_ONCE)
        x, y = logits[part].double(), labels[part].double()
        losses = torch.nn.functional.binary_cross_entropy_with_logits(x, y, reduction="none")
        columns = [losses, y, x.sigmoid()]
        if weights is not None:
            weight = weights[part].double()
            columns = [weight, *(column * weight for column in columns)]
        parts.append(torch.stack([column.sum() for column in columns]))
    sums = torch.stack(parts).sum(0).tolist()
    weight, loss, clicks, predicted = sums if weights is not None else [len(logits), *sums]
    return weight, loss, clicks, predicted
