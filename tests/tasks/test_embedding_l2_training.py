"""A DLRM trained with coupled L2 of its tables, against dense optimizers."""

import itertools

import pytest
import torch

from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.synthetic import SyntheticDataset
from dlrm.model.config import DLRMConfig
from dlrm.tasks.config import ClickConfig
from dlrm.tasks.recommendation import ClickLoader, Recommendation
from dlrm.train.checkpoints.directory import CheckpointDirectory
from dlrm.train.config import PrecisionConfig, TrainConfig
from dlrm.train.log import RunLog, StoppedError
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


def run(kind, task, hotness=None, scale=1, checkpoints=None, stop_at=None, resume=False, **config):
    """Trains with tests in between; returns the trainer."""
    trainer = Trainer(
        task,
        optimizers=optimizers(task, kind),
        schedule=rate,
        config=TrainConfig(test_freq=7, **config),
        log=RunLog(quiet=True),
        checkpoints=checkpoints,
        after_step=lambda step: setattr(trainer, "stop_requested", step == stop_at),
    )
    if resume:
        trainer.resume(checkpoints.last())
    trainer.fit(*data(hotness, scale))
    return trainer


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


@pytest.mark.parametrize("kind", sorted(DENSE))
@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        ({}, {"hotness": 4}),
        ({"hash_indices": True}, {"scale": 9}),
        ({"hash_indices": True}, {"scale": 9, "hotness": 4}),
        ({"wide": True}, {}),
        ({"wide": True, "hash_indices": True}, {"scale": 9, "hotness": 4}),
    ],
    ids=["one id", "bags", "hashed", "hashed bags", "wide", "wide hashed bags"],
)
@pytest.mark.parametrize("parts", [1, 3])
def test_training_is_that_of_dense_optimizers(kind, changes, options, parts):
    ours, theirs = task(**changes), task(**changes)
    run(kind, ours, **options, gradient_accumulation_steps=parts)
    train_densely(kind, theirs, options.get("hotness"), options.get("scale", 1))
    for (name, actual), expected in zip(
        ours.model.named_parameters(), theirs.model.parameters(), strict=True
    ):
        torch.testing.assert_close(
            actual, expected, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("kind", ["adagrad", "adam"])
@pytest.mark.parametrize(
    "changes",
    [
        {"embedding_dtype": "fp32"},
        {"embedding_dtype": "bf16"},
        {
            **{"interaction_op": "quadratic", "batch_norm": True, "dropout": 0.3},
            **{"self_ensemble": True, "wide": True},
        },
        {"ensemble": "dot,quadratic", "batch_norm": True, "dropout": 0.3},
    ],
    ids=["fp32", "bf16", "quadratic", "mixed"],
)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(kind, changes, tmp_path):
    whole, stopped, resumed = (task(**changes) for _ in range(3))
    torch.manual_seed(1)
    run(kind, whole)
    torch.manual_seed(1)
    with pytest.raises(StoppedError):
        run(kind, stopped, checkpoints=CheckpointDirectory(tmp_path), stop_at=11)
    again = run(kind, resumed, checkpoints=CheckpointDirectory(tmp_path), resume=True)
    assert again.progress.step == STEPS
    last = task(**changes)  # the resumed model has the weights of the best step
    read = Trainer(last, optimizers=optimizers(last, kind), schedule=rate, config=TrainConfig())
    read.resume(again.checkpoints.last())
    expected = whole.model.state_dict()
    for name, value in last.model.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("kind", ["sgd", "row_wise_adagrad"])
def test_one_that_was_saved_at_the_same_steps_has_the_same_bits(kind, tmp_path):
    def tables(name, **options):
        directory = CheckpointDirectory(tmp_path / name)
        end = run(kind, task(), checkpoints=directory, **options)
        return (end.checkpoints.last() / "tables" / "2.bin").read_bytes()

    with pytest.raises(StoppedError):
        tables("stopped", checkpoint_freq=5, stop_at=10)
    resumed = tables("stopped", checkpoint_freq=5, resume=True)
    assert resumed == tables("whole", checkpoint_freq=5)


def test_l2_that_turns_signs_at_the_highest_rate_is_refused():
    with pytest.raises(ValueError, match="--embedding_l2 0.1: with sgd at --lr 28.0 weights chan"):
        ClickConfig(
            DataConfig(dataset="."),
            TrainConfig(),
            ScheduleConfig(),
            OptimizerConfig(embedding_l2=0.1),
            PrecisionConfig(),
        )
