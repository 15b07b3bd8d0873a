"""Trains a click model from Python: a CSV file becomes a dataset, a model, a checkpoint and scores.

python examples/train.py
"""

import csv
import random
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path

from pyarrow.csv import read_csv

import dlrm
from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import open_datasets
from dlrm.model.config import DLRMConfig
from dlrm.tasks.recommendation import ClickLoader, Recommendation
from dlrm.train.checkpoints.directory import CheckpointDirectory
from dlrm.train.config import TrainConfig
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.schedule import ScheduleConfig, learning_rate
from dlrm.train.trainer import Trainer


def main(folder: Path) -> float:
    """Runs every step in `folder` and returns the AUC of the test rows."""
    clicks, dataset, checkpoints = folder / "clicks.csv", folder / "dataset", folder / "checkpoints"
    write_clicks(clicks, rows=20_000)

    # Text becomes ids, numbers are standardized, and a fifth of the rows is set aside for testing.
    schema = {
        "label": "clicked",
        "numerical": ["hour", "price"],
        "categorical": ["site", "device"],
    }
    dlrm.Dataset.from_arrow(read_csv(clicks), schema, dataset)
    data = open_datasets(DataConfig(dataset=str(dataset), batch_size=128))

    # A task joins a model, its loss and its metric.
    architecture = DLRMConfig(
        table_sizes=tuple(data.train.table_sizes),
        num_numerical_features=data.train.num_numerical,
        embedding_dim=8,
        bottom_mlp_sizes=(16, 8),
        top_mlp_sizes=(32, 1),
    )
    task = Recommendation(architecture)

    # Checkpoints describe the model and keep the dataset's transform, so that they score raw rows.
    optimizers = OptimizerConfig(embedding_optimizer="adam", mlp_optimizer="adam")
    trainer = Trainer(
        task=task,
        optimizers=task.optimizers(optimizers),
        schedule=partial(learning_rate, ScheduleConfig(lr=0.005, warmup_steps=20, decay_steps=0)),
        config=TrainConfig(epochs=2),
        checkpoints=CheckpointDirectory(checkpoints, attached=dataset / "transform"),
        run={"flags": asdict(architecture), "dataset": {"table sizes": data.train.table_sizes}},
    )
    results = trainer.fit(ClickLoader(data.train, shuffle=True), ClickLoader(data.test))

    # The best checkpoint scores rows as they are in the CSV file.
    rows = [{"hour": 9, "price": 20, "site": site, "device": "phone"} for site in ("s0", "s9")]
    for row, probability in zip(rows, dlrm.load(checkpoints).predict(rows), strict=True):
        print(f"{row}: clicked with probability {probability:.3f}")
    print(f"test AUC, which chose the checkpoint: {results['best_auc']:.4f}")
    return results["best_auc"]


def write_clicks(path: Path, rows: int) -> None:
    """Simulates rows of a log in which some sites, and phones, get more clicks."""
    draw = random.Random(1)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["clicked", "hour", "price", "site", "device"])
        for _ in range(rows):
            site, device = draw.randrange(10), draw.choice(["phone", "tablet", "laptop"])
            share = 0.05 + 0.06 * site + 0.2 * (device == "phone")
            hour, price = draw.randrange(24), round(draw.uniform(1, 50), 2)
            writer.writerow([int(draw.random() < share), hour, price, f"s{site}", device])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
