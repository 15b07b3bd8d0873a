"""Edges of the bins of numerical fields are those of the first training rows."""

import torch

from dlrm.data.clicks.batch import Batch
from dlrm.model.config import DLRMConfig
from dlrm.model.dlrm import DLRM
from dlrm.tasks.numerical_edges import fit_edges


class Batches(list):
    batch, batch_size = list.__getitem__, 4


def test_rows_after_the_first_do_not_count(monkeypatch):
    monkeypatch.setattr("dlrm.tasks.numerical_edges.ROWS", 6)
    parts = {"numerical_embedding": "piecewise", "numerical_bins": 2}
    model = DLRM(DLRMConfig((9,), 1, 8, (8,), (4, 1), **parts))
    numbers = torch.arange(8.0).view(2, 4, 1)
    batches = [Batch(own, torch.zeros(4, 1), torch.zeros(4)) for own in numbers]
    assert fit_edges(model, Batches([*batches, None])) is None
    assert model.numerical_embedding.edges.tolist() == [[0, 2, 5]]  # bins of 0, 1 and of 2 to 5
