"""Trains a network of your own with this package's tables, loader, optimizers and trainer.

python examples/own_model.py
"""

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

import dlrm
from dlrm.data.clicks.batch import Batch
from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import open_datasets
from dlrm.model.config import DLRMConfig
from dlrm.model.tables.joint import make_tables
from dlrm.tasks.click_task import ClickTask
from dlrm.tasks.recommendation import ClickLoader
from dlrm.train.config import TrainConfig
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.trainer import Trainer


class FactorizationMachine(nn.Module):
    """Products of all pairs of vectors, and a linear layer of the numerical fields."""

    def __init__(self, table_sizes: list[int], num_numerical: int, dim: int = 8):
        super().__init__()
        config = DLRMConfig(tuple(table_sizes), num_numerical, dim, bottom_mlp_sizes=(dim,))
        self.tables = make_tables(config, config.placed(num_ranks=1))
        self.linear = nn.Linear(num_numerical, 1)

    def forward(self, batch: Batch) -> Tensor:
        vectors = self.tables(batch.categorical, torch.float32)  # [samples, tables, dim]
        pairs = vectors.sum(1).square() - vectors.square().sum(1)
        return pairs.sum(1) / 2 + self.linear(batch.numerical.float()).squeeze(1)


def simulated(rows: int) -> dlrm.Dataset:
    """Returns rows whose users click on a quarter of the items; the best possible AUC is 0.8."""
    random = np.random.default_rng(1)
    user, item, hour = (random.integers(0, count, rows) for count in (60, 40, 24))
    clicked = random.random(rows) < np.where(user % 4 == item % 4, 0.7, 0.1)
    frame = pa.table({"clicked": clicked.astype(int), "hour": hour, "user": user, "item": item})
    schema = {"label": "clicked", "numerical": ["hour"], "categorical": ["user", "item"]}
    return dlrm.Dataset.from_arrow(frame, schema)


if __name__ == "__main__":
    dataset = simulated(20_000)
    data = open_datasets(DataConfig(str(dataset.path), batch_size=128))
    task = ClickTask(FactorizationMachine(data.train.table_sizes, data.train.num_numerical))
    optimizers = task.optimizers(OptimizerConfig(embedding_optimizer="adam", mlp_optimizer="adam"))
    length, rate = TrainConfig(epochs=2), lambda step: 0.01
    trainer = Trainer(task, optimizers=optimizers, schedule=rate, config=length)
    results = trainer.fit(ClickLoader(data.train, shuffle=True), ClickLoader(data.test))
    print(f"test AUC: {results['best_auc']:.4f}")
