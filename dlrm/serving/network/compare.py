"""Agreement of an exported model with its checkpoint: in value, in ranking, table by table."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from dlrm.metrics.clicks import click_metrics
from dlrm.model.dlrm import DLRM
from dlrm.model.ensemble import Ensemble, members_of
from dlrm.serving.network.exportable import exportable
from dlrm.serving.network.platforms import Score
from dlrm.serving.network.quantize import QuantizedTables, quantize_tables
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


@torch.inference_mode()
def compare_tables(
    model: DLRM | Ensemble, tables: QuantizedTables, inputs: Inputs, labels: np.ndarray
) -> list[Agreement]:
    """Returns, for each table, the effect on a model's logits of quantizing only this table.

    The model's rows are replaced temporarily.
    """
    full = quantize_tables(model, "fp32").values
    exported = exportable(model, QuantizedTables(full), inputs)

    def score(*arrays: np.ndarray) -> np.ndarray:
        return exported(*map(torch.from_numpy, arrays)).numpy()

    before = score_rows(score, inputs)
    result = []
    for parts in _places(model):
        kept = [full[part].clone() for part in parts]
        for part in parts:
            full[part] = tables.rows(part.start, part.stop).float()
        result.append(agreement(before, score_rows(score, inputs), labels))
        for part, values in zip(parts, kept, strict=True):
            full[part] = values
    return result


def _places(model: DLRM | Ensemble) -> list[list[slice]]:
    """Returns, for each table, the indices of its rows among all, member by member."""
    rows = model.config.embedding_rows
    ends = np.cumsum(rows)
    firsts = [sum(rows) * index for index in range(len(members_of(model)))]
    return [
        [slice(first + int(end) - size, first + int(end)) for first in firsts]
        for end, size in zip(ends, rows, strict=True)
    ]


def table_lines(
    names: Sequence[str],
    model: DLRM | Ensemble,
    tables: QuantizedTables,
    agreements: Sequence[Agreement],
) -> list[str]:
    """Returns a table to print: size of each table, and the effect of quantizing only this one."""
    lines = [f"{'table':<24}{'rows':>12}{'bytes':>14}{'of fp32':>9}{'AUC':>12}{'log loss':>12}"]
    for name, parts, agreement in zip(names, _places(model), agreements, strict=True):
        rows = sum(part.stop - part.start for part in parts)
        size = sum(tables.rows(part.start, part.stop).num_bytes for part in parts)
        share = size / (4 * rows * model.config.embedding_dim)
        lines.append(
            f"{name:<24}{rows:>12,}{size:>14,}{share:>9.3f}"
            f"{agreement.auc_change:>+12.1e}{agreement.log_loss_change:>+12.1e}"
        )
    return lines
