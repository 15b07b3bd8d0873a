"""Importance of each field: over many rows by permutation, for one row by gradients."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dlrm.data.bags import indices_of
from dlrm.metrics.judged import delong_difference
from dlrm.metrics.ranked import RankedRows
from dlrm.serving.network.exportable import Exportable
from dlrm.serving.network.quantize import quantize_tables
from dlrm.serving.rows.inputs import Inputs
from dlrm.serving.scoring import Scorer, field_names

if TYPE_CHECKING:
    from dlrm.serving.predictor import Predictor


class FieldImportance(NamedTuple):
    """Loss of quality when the values of a field are shuffled among the rows.

    Attributes:
        field: name of the field.
        auc_lost: AUC before minus after.
        low, high: bounds of its 95 % interval, by DeLong's test of the same rows.
        p: p-value of no loss.
        log_loss_gained: log loss after minus before.
    """

    field: str
    auc_lost: float
    low: float
    high: float
    p: float
    log_loss_gained: float


class Sample:
    """Keeps at most `most` evenly spaced rows of blocks whose number is unknown."""

    def __init__(self, most: int) -> None:
        self._most, self._stride, self._seen = most, 1, 0
        self._parts: list[tuple[Inputs, np.ndarray]] = []

    def add(self, inputs: Inputs, labels: np.ndarray) -> None:
        """Adds a block of rows."""
        chosen = np.arange(-self._seen % self._stride, len(labels), self._stride)
        self._seen += len(labels)
        self._parts.append((inputs.take(chosen), labels[chosen]))
        while sum(len(labels) for _, labels in self._parts) > self._most:
            self._stride *= 2
            joined, known = self.rows()
            self._parts = [(joined.take(np.arange(0, len(known), 2)), known[::2])]

    def rows(self) -> tuple[Inputs, np.ndarray]:
        """Returns inputs and labels of the rows that are kept."""
        inputs, labels = zip(*self._parts, strict=True)
        return Inputs.joined(inputs), np.concatenate(labels)


def permutation_importance(
    predictor: Scorer, inputs: Inputs, labels: np.ndarray, seed: int = 0
) -> list[FieldImportance]:
    """Returns the importance of every field (Breiman, 2001), the most important first.

    The rows are scored once more for each field, several fields at a time; tables and inputs are
    unchanged.

    Args:
        inputs: inputs of rows that it was not trained on.
        labels: `[rows]`, 0 or 1.
    """
    before = RankedRows(predictor.logits_of(inputs), labels)
    loss = before.metrics()["log_loss"]
    first_table = inputs.numerical.shape[1]
    names = [name for kind in field_names(predictor) for name in kind]

    def of_field(field: int) -> FieldImportance:
        order = np.random.default_rng([seed, field]).permutation(len(labels))
        if field < first_table:
            numerical = inputs.numerical.copy()
            numerical[:, field] = numerical[order, field]
            dealt = inputs._replace(numerical=numerical)
        else:
            dealt = _dealt(inputs, field - first_table, order)
        after = RankedRows(predictor.logits_of(dealt), labels)
        gained = after.metrics()["log_loss"] - loss
        return FieldImportance(names[field], *delong_difference(before, after, labels), gained)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        found = threads.map(of_field, range(first_table + inputs.num_tables))
        return sorted(found, key=lambda one: -one.auc_lost)


def _dealt(inputs: Inputs, table: int, order: np.ndarray) -> Inputs:
    """Returns the inputs with the ids of a table permuted over the rows."""
    if inputs.lengths is None:
        ids = inputs.ids.copy()
        ids[:, table] = ids[order, table]
        return inputs._replace(ids=ids)
    bags = np.arange(inputs.lengths.size).reshape(inputs.lengths.shape)
    bags[:, table] = bags[order, table]
    indices, lengths = indices_of(inputs.lengths.ravel(), bags.ravel())
    weights = None if inputs.weights is None else inputs.weights[indices]
    return inputs._replace(
        ids=inputs.ids[indices], lengths=lengths.reshape(bags.shape), weights=weights
    )


def contributions(predictor: "Predictor", inputs: Inputs) -> np.ndarray:
    """Returns gradient times input of each field for the logit of each row, `[rows, fields]`.

    The input of a table is the vector of the row's id, so its contribution is a dot product, plus
    the id's weight in the wide term; contributions of several ids are added up.
    """
    tables = quantize_tables(predictor.model, "fp32")
    model = Exportable(predictor.model, tables, recalibration=predictor.recalibration)
    looked_up: list[Tensor] = []

    def keep(module: torch.nn.Module, arguments: object, vectors: Tensor) -> Tensor:
        looked_up.append(vectors.detach().requires_grad_())
        return looked_up[-1]

    hooks = [part.register_forward_hook(keep) for part in (model.tables, model.wide)]
    try:
        numerical = torch.from_numpy(inputs.numerical).float().requires_grad_()
        logits = model(numerical, *map(torch.from_numpy, inputs.arrays[1:]))
    finally:
        for hook in hooks:
            hook.remove()
    leaves = [numerical, *looked_up]
    gradients = torch.autograd.grad(logits.sum(), leaves, allow_unused=True)
    of_numerical, *of_tables = (
        torch.zeros_like(value) if gradient is None else gradient * value
        for gradient, value in zip(gradients, leaves, strict=True)
    )
    by_table = sum((part.sum(-1) for part in of_tables[1:]), of_tables[0].sum(-1))  # or by id
    if inputs.lengths is not None:
        bags = torch.from_numpy(inputs.bags_of_ids())
        by_table = torch.zeros(inputs.lengths.size).index_add(0, bags, by_table)
    by_table = by_table.reshape(len(numerical), inputs.num_tables)
    return torch.cat([of_numerical, by_table], dim=1).detach().numpy()
