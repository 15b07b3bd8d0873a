"""A task small enough to check by hand: a line fitted to points."""

from collections.abc import Generator

import torch
from torch import nn

from dlrm.distributed import World
from dlrm.train.config import TrainConfig
from dlrm.train.optim.dense import dense_optimizer
from dlrm.train.task import Task
from dlrm.train.trainer import Trainer


class Points:
    """Batches of points on a line; batch i is a pure function of i."""

    def __init__(self, num_batches: int = 10, size: int = 4, device: str = "cpu"):
        self.num_batches, self.size, self.num_samples = num_batches, size, num_batches * size
        self.device = device
        self.open = 0

    def __len__(self) -> int:
        return self.num_batches

    def batches(self, epoch: int = 0, start: int = 0) -> Generator:
        self.open += 1
        try:
            for index in range(start, self.num_batches):
                random = torch.Generator().manual_seed(1000 * epoch + index)
                x = torch.randn(self.size, 3, generator=random).to(self.device)
                yield x, x.sum(dim=1)
        finally:
            self.open -= 1


class Line(Task):
    """A small network with dropout, so the state of torch's random generator matters."""

    metric, loss_metric = "score", "error"
    batch_size = 4  # that of Points

    def __init__(self, scores=(), dropout: float = 0.25, device: str = "cpu"):
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(dropout), nn.Linear(8, 1))
        self.model.to(device)
        self.device = device
        self.scores, self.evaluations = list(scores), []

    def loss(self, batch):
        x, y = batch
        return ((self.model(x)[:, 0] - y) ** 2).sum() / self.batch_size

    def split(self, batch, parts):
        return list(zip(*(tensor.tensor_split(parts) for tensor in batch), strict=True))

    def num_samples(self, batch) -> int:
        return len(batch[0])

    def evaluate(self, loader):
        """Returns the error, and the next given score or its own."""
        self.model.eval()
        with torch.no_grad():
            error = sum(float(self.loss(batch)) for batch in loader.batches()) / len(loader)
        self.model.train()
        score = self.scores.pop(0) if self.scores else 1 / (1 + error)
        self.evaluations.append(score)
        return {"score": score, "error": error}

    def parameter_groups(self):
        return {"tables": [], "dense": list(self.model.parameters())}

    def weights(self):
        return [p.detach().clone() for p in self.model.parameters()]


def trainer(task=None, log=None, checkpoints=None, kind="adam", schedule=None, **config) -> Trainer:
    task = task or Line()
    return Trainer(
        task,
        optimizers=[dense_optimizer(kind, task.model.parameters())],
        schedule=schedule or (lambda step: 0.01 * step),
        config=TrainConfig(**config),
        world=World(device=task.device),
        log=log,
        checkpoints=checkpoints,
        run={"flags": {}},
    )
