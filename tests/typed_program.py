"""A user's program, which `tests/test_typed_program.py` type-checks strictly and runs."""

from typing import Any

import numpy as np
import polars
import torch

import dlrm
from dlrm import ops


def train_and_score(rows: polars.DataFrame, folder: str) -> tuple[np.ndarray[Any, Any], float]:
    """Trains on rows, saves and loads the model, and scores the rows."""
    model = dlrm.fit(rows, label="clicked", batch_size=64, max_steps=4, base_device="cpu")
    model.save(folder)
    loaded = dlrm.load(folder)
    metrics = loaded.evaluate(rows)
    vectors = ops.dot_interaction(torch.ones(2, 4), torch.ones(2, 3, 4))
    return loaded.predict(rows) + float(vectors.sum()) * 0, metrics["auc"]
