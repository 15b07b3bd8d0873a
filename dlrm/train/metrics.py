"""What a model's scores are worth: ROC AUC, log loss, normalised entropy, calibration."""

import math

import numpy as np
import torch
from torch import Tensor

from dlrm.distributed import World


def roc_auc(scores: Tensor, labels: Tensor, world: World = World()) -> float:
    """Returns the exact area under the ROC curve; tied scores count half, as in scikit-learn.

    It is the share of (negative, positive) pairs that the scores put in order, counted in integers:
    negatives and positives are sorted apart, and every positive is placed among the negatives.

    Args:
        scores: `[n]`, any floating dtype; logits and probabilities give the same.
        labels: `[n]`, 0 or 1.
        world: the processes that train together.

    Returns:
        The area, or NaN where there are only positives or only negatives.

    Raises:
        ValueError: shapes differ, a score is NaN, or a label is neither 0 nor 1.
    """
    assert world.size == 1, "one process"
    if scores.ndim != 1 or scores.shape != labels.shape:
        raise ValueError(
            f"roc_auc: expected scores and labels [n], got {list(scores.shape)} and "
            f"{list(labels.shape)}"
        )
    if scores.isnan().any():
        raise ValueError("roc_auc: a score is NaN")
    positive = labels == 1
    if not (positive | (labels == 0)).all():
        raise ValueError("roc_auc: expected labels 0 and 1")
    positives, negatives = _sorted(scores[positive]), _sorted(scores[~positive])
    pairs = len(positives) * len(negatives)
    if not pairs:
        return math.nan
    below, not_above = _ranks(negatives, positives)
    return (below + not_above) / (2 * pairs)


def click_metrics(logits: Tensor, labels: Tensor, world: World = World()) -> dict[str, float]:
    """Returns what is reported of a test set.

    Args:
        logits: `[n]`.
        labels: `[n]`, 0 or 1.
        world: the processes that train together.

    Returns:
        `auc`; `log_loss` in nats; `normalized_entropy`, the log loss relative to that of always
        predicting the click rate (He et al., 2014); `calibration`, predicted over observed clicks.
        All are NaN where a logit is NaN or infinite.
    """
    logits, labels = logits.double(), labels.double()
    log_loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels).item()
    if not math.isfinite(log_loss):
        return dict.fromkeys(("auc", "log_loss", "normalized_entropy", "calibration"), math.nan)
    rate = labels.mean().item()
    entropy = -sum(p * math.log(p) for p in (rate, 1 - rate) if p > 0)
    return {
        "auc": roc_auc(logits.float(), labels, world),
        "log_loss": log_loss,
        "normalized_entropy": log_loss / entropy if entropy else math.nan,
        "calibration": logits.sigmoid().mean().item() / rate if rate else math.nan,
    }


def _sorted(scores: Tensor) -> Tensor:
    if scores.is_cuda:
        return scores.sort().values
    if scores.dtype in (torch.bfloat16, torch.float16):
        scores = scores.float()
    return torch.from_numpy(np.sort(scores.numpy()))  # vectorised: 100 M floats in seconds


def _ranks(negatives: Tensor, positives: Tensor) -> tuple[int, int]:
    """Sums over the positives of the negatives that are below, and that are not above."""
    below = torch.searchsorted(negatives, positives).sum()
    not_above = torch.searchsorted(negatives, positives, right=True).sum()
    return int(below), int(not_above)
