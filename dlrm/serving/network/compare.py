"""Agreement of an exported model with its checkpoint, in value and in ranking."""

import math
from typing import NamedTuple

import numpy as np
import torch

from dlrm.metrics.clicks import click_metrics
from dlrm.serving.network.platforms import Score
from dlrm.serving.rows.inputs import Inputs

_BATCH = 4096


class Agreement(NamedTuple):
    """Comparison of the scores of two models on the same rows.

    Attributes:
        rows: number of rows.
        auc, auc_before: AUC of the scores, and of the reference scores; NaN with one class only.
        log_loss, log_loss_before: log loss of both.
        greatest_difference: greatest difference of two scores.
        greatest_score: greatest magnitude of a reference score.
    """

    rows: int
    auc: float
    auc_before: float
    log_loss: float
    log_loss_before: float
    greatest_difference: float
    greatest_score: float

    @property
    def auc_change(self) -> float:
        """Returns the AUC gained, or lost if negative; 0 with one class only."""
        change = self.auc - self.auc_before
        return 0.0 if math.isnan(change) else change

    @property
    def log_loss_change(self) -> float:
        """Returns the change of the log loss."""
        return self.log_loss - self.log_loss_before


def agreement(
    before: np.ndarray, after: np.ndarray, labels: np.ndarray, probabilities: bool = False
) -> Agreement:
    """Compares logits (or probabilities) `[rows]`."""
    old, new = (
        click_metrics(_logits(scores) if probabilities else torch.from_numpy(scores), known)
        for known in [torch.from_numpy(labels)]
        for scores in (before, after)
    )
    difference = np.abs(before - after)
    return Agreement(
        len(before),
        new["auc"],
        old["auc"],
        new["log_loss"],
        old["log_loss"],
        float(difference.max(initial=0)),
        float(np.abs(before).max(initial=0)),
    )


def _logits(probabilities: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(probabilities).double().logit(eps=1e-9)


def score_rows(score: Score, inputs: Inputs) -> np.ndarray:
    """Returns the scores `[rows]` of a model, computed some thousand rows at a time."""
    parts = [
        score(*inputs.part(begin, begin + _BATCH).arrays)[:, 0]
        for begin in range(0, len(inputs.numerical), _BATCH)
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.float32)
