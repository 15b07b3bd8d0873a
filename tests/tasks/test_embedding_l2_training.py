"""A DLRM trained with coupled L2 of its tables, against dense optimizers."""

import itertools

import pytest
import torch

from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.synthetic import SyntheticDataset
from dlrm.model.config import DLRMConfig
from dlrm.tasks.recommendation import ClickLoader, Recommendation
from dlrm.tasks.settle import Config
from dlrm.train.config import PrecisionConfig, TrainConfig
from dlrm.train.log import RunLog
from dlrm.train.optim.base import set_learning_rate
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.schedule import ScheduleConfig
from dlrm.train.trainer import Trainer

pytestmark = pytest.mark.long
SIZES, BATCH, STEPS, L2, DECAY = (40, 7, 400), 8, 30, 0.05, 0.02
DENSE = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}


def rate(step):
    return 0.1 / step**0.5


def task(**changes):
    sizes = {"bottom_mlp_sizes": (8,), "top_mlp_sizes": (8, 1)}
    return Recommendation(DLRMConfig(SIZES, 4, 8, **sizes, **changes), seed=5)


def data(hotness=None, scale=1):
    spec = FeatureSpec.default(".", 4, [size * scale for size in SIZES])
    return (
        ClickLoader(
            SyntheticDataset(spec, split, rows, BATCH, seed=1, hotness=hotness and [hotness])
        )
        for split, rows in (("train", BATCH * STEPS), ("test", 40))
    )


def optimizers(task, kind):
    mlps = kind.removeprefix("row_wise_")
    return task.optimizers(OptimizerConfig(kind, mlps, embedding_l2=L2, weight_decay=DECAY))


def run(kind, task, hotness, scale, **config):
    """Trains with tests in between."""
    trainer = Trainer(
        task,
        optimizers=optimizers(task, kind),
        schedule=rate,
        config=TrainConfig(test_freq=7, **config),
        log=RunLog(quiet=True),
    )
    trainer.fit(*data(hotness, scale))


def train_densely(kind, task, hotness, scale):
    """Trains with torch's optimizers, which treat tables like any other matrix."""
    groups = task.parameter_groups()
    matrices = [weight for weight in groups["dense"] if weight.ndim > 1]
    biases = [weight for weight in groups["dense"] if weight.ndim < 2]
    optimizers = [
        DENSE[kind](groups["tables"], lr=0.0, weight_decay=L2),
        DENSE[kind](matrices, lr=0.0, weight_decay=DECAY),
        DENSE[kind](biases, lr=0.0),
    ]
    train, _ = data(hotness, scale)
    for step, batch in enumerate(itertools.islice(train.batches(), STEPS), 1):
        set_learning_rate(optimizers, rate(step))
        task.loss(batch).backward()
        for weight in groups["tables"]:
            weight.grad = weight.grad.to_dense()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("kind", "changes", "hotness", "scale", "parts"),
    [
        *((kind, {}, None, 1, parts) for kind in DENSE for parts in (1, 3)),
        ("sgd", {}, 4, 1, 3),
        ("adagrad", {}, 4, 1, 1),
        ("sgd", {"hash_indices": True}, 4, 9, 1),
        ("adam", {"hash_indices": True}, None, 9, 3),
        ("adagrad", {"wide": True}, None, 1, 3),
        ("adam", {"wide": True, "hash_indices": True}, 4, 9, 1),
    ],
    ids=str,
)
def test_training_is_that_of_dense_optimizers(kind, changes, hotness, scale, parts):
    ours, theirs = task(**changes), task(**changes)
    run(kind, ours, hotness, scale, gradient_accumulation_steps=parts)
    train_densely(kind, theirs, hotness, scale)
    for (name, actual), expected in zip(
        ours.model.named_parameters(), theirs.model.parameters(), strict=True
    ):
        torch.testing.assert_close(
            actual, expected, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_l2_that_turns_signs_at_the_highest_rate_is_refused():
    with pytest.raises(ValueError, match="--embedding_l2 0.1: with sgd at --lr 28.0 weights chan"):
        Config(
            data=DataConfig(dataset="."),
            train=TrainConfig(),
            schedule=ScheduleConfig(),
            optimizers=OptimizerConfig(embedding_l2=0.1),
            precision=PrecisionConfig(),
        )
