"""What a model's scores are worth: ROC AUC, log loss, normalised entropy, calibration."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from dlrm.distributed import World, gather
from dlrm.train.auc import raise_problems, roc_auc, shape_problem

_ROWS_AT_ONCE = 1 << 20  # in float64


def click_metrics(logits: Tensor, labels: Tensor, world: World = World()) -> dict[str, float]:
    """Returns what is reported of a test set; every rank returns the same, of the rows of all.

    Args:
        logits: `[n]`.
        labels: `[n]`, 0 or 1.
        world: the processes that have rows, each its own: any number of them, or none.

    Returns:
        `auc`; `log_loss` in nats; `normalized_entropy`, the log loss relative to that of always
        predicting the click rate (He et al., 2014); `calibration`, predicted over observed clicks.
        All are NaN where a logit is NaN or infinite.

    Raises:
        ValueError: shapes differ, or a label is neither 0 nor 1; all ranks raise it.
    """
    rows, loss, clicks, predicted = _sums_of_all("click_metrics", logits, labels, world)
    if not rows or not math.isfinite(loss):
        return dict.fromkeys(("auc", "log_loss", "normalized_entropy", "calibration"), math.nan)
    rate, log_loss = clicks / rows, loss / rows
    entropy = -sum(p * math.log(p) for p in (rate, 1 - rate) if p > 0)
    return {
        "auc": roc_auc(logits.float(), labels, world),
        "log_loss": log_loss,
        "normalized_entropy": log_loss / entropy if entropy else math.nan,
        "calibration": predicted / clicks if clicks else math.nan,
    }


def fraction_metrics(logits: Tensor, targets: Tensor, world: World = World()) -> dict[str, float]:
    """Returns what is reported of a test set whose targets are fractions.

    Args:
        logits: `[n]`.
        targets: `[n]`, from 0 to 1.
        world: the processes that have rows, as in `click_metrics`.

    Returns:
        `log_loss` in nats, the mean binary cross-entropy; NaN where a logit is NaN or infinite.

    Raises:
        ValueError: shapes differ; all ranks raise it.
    """
    rows, loss, *_ = _sums_of_all("fraction_metrics", logits, targets, world)
    return {"log_loss": loss / rows if rows and math.isfinite(loss) else math.nan}


def metrics_note(names: Iterable[str]) -> str | None:
    """Explains the metrics that are little known, where they are among `names`; else None."""
    if not any(name.endswith(("normalized_entropy", "calibration")) for name in names):
        return None
    return (
        "normalized_entropy: log loss relative to always predicting the click rate, lower is "
        "better and below 1 is of use; calibration: predicted over observed clicks, 1 is right"
    )


def one_class_note(metrics: dict[str, float], rows: int) -> str | None:
    """Says why there is no AUC where all labels are of one class; else None."""
    if not math.isnan(metrics.get("auc", 0.0)) or not rows or math.isnan(metrics["log_loss"]):
        return None
    label = 0 if math.isnan(metrics["calibration"]) else 1
    return f"note: no AUC can be computed, since all {rows:,} rows have the label {label}"


def unscored_text(score: float) -> str:
    """Says what is wrong with a score that is no finite number."""
    return (
        f"expected a finite score, got {score}: the model's weights are not finite, or too large "
        "for the row's numbers"
    )


def _sums_of_all(
    operation: str, logits: Tensor, labels: Tensor, world: World
) -> tuple[int, float, float, float]:
    """As `_sums`, over the rows of all ranks."""
    problem = shape_problem(logits, labels)
    own = (0, 0.0, 0.0, 0.0) if problem else _sums(logits, labels)
    facts = gather((problem, own), world)
    raise_problems(operation, [rank_problem for rank_problem, _ in facts], world.rank)
    rows, losses, clicks, predicted = zip(*(sums for _, sums in facts), strict=True)
    return sum(rows), sum(losses), sum(clicks), sum(predicted)


def _sums(logits: Tensor, labels: Tensor) -> tuple[int, float, float, float]:
    """Rows; sums of losses, labels and predicted probabilities."""
    parts = []
    for x, y in zip(logits.split(_ROWS_AT_ONCE), labels.split(_ROWS_AT_ONCE), strict=True):
        x, y = x.double(), y.double()
        losses = torch.nn.functional.binary_cross_entropy_with_logits(x, y, reduction="none")
        parts.append(torch.stack([losses.sum(), y.sum(), x.sigmoid().sum()]))
    loss, clicks, predicted = torch.stack(parts).sum(0).tolist()
    return len(logits), loss, clicks, predicted
