"""Trains a click model with an interaction of your own, saves it, and loads it again.

python examples/own_interaction.py
"""

import tempfile

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

import dlrm


@dlrm.register_interaction("bilinear")
class Bilinear(nn.Module):
    """Returns x_i W x_j for each pair of vectors, as FiBiNET does (Huang et al., 2019)."""

    def __init__(self, num_vectors: int, dim: int):
        super().__init__()
        self.linear = nn.Linear(dim, dim, bias=False)
        self.pairs = torch.tril_indices(num_vectors, num_vectors, offset=-1).tolist()

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        vectors = torch.cat([dense.unsqueeze(1), embeddings], dim=1)
        products = self.linear(vectors) @ vectors.mT
        rows, columns = self.pairs
        return torch.cat([dense, products[:, rows, columns]], dim=1)  # of any width


def simulated(rows: int) -> pa.Table:
    """Returns rows whose users click on a quarter of the items; the best possible AUC is 0.8."""
    random = np.random.default_rng(1)
    user, item = random.integers(0, 60, rows), random.integers(0, 40, rows)
    clicked = random.random(rows) < np.where(user % 4 == item % 4, 0.7, 0.1)
    ids = {"user": [f"u{i}" for i in user], "item": [f"i{i}" for i in item]}
    return pa.table({"clicked": clicked.astype(int), "hour": random.integers(0, 24, rows), **ids})


def main() -> None:
    frame = simulated(20_000)
    schema = {"label": "clicked", "numerical": ["hour"], "categorical": ["user", "item"]}
    model = dlrm.fit(frame, schema, interaction_op="bilinear", embedding_dim=8, epochs=3)
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/model")
        loaded = dlrm.load(f"{folder}/model")  # in a program that has registered "bilinear"
    rows = [{"hour": 9, "user": "u1", "item": item} for item in ("i1", "i2")]
    matching, other = loaded.predict(rows)
    print(f"click probabilities: {matching:.3f} for a matching item, {other:.3f} for another")
    print(f"test AUC: {model.results['test_auc']:.4f}")


if __name__ == "__main__":
    main()
