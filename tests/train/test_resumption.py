"""A run that is stopped and resumed ends with the bits of one that was not."""

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from small_texts import Rows, small
from toy import Line, Points

from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.synthetic import SyntheticDataset
from dlrm.distributed import World
from dlrm.language.loader import TextLoader
from dlrm.language.task import PreTraining, QuestionAnswering, SequenceClassification
from dlrm.model.config import DLRMConfig
from dlrm.tasks.recommendation import ClickLoader, Recommendation
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.directory import CheckpointDirectory
from dlrm.train.config import TrainConfig
from dlrm.train.ema import EMA
from dlrm.train.log import RunLog, StoppedError
from dlrm.train.optim.config import NetworkOptimizerConfig, OptimizerConfig
from dlrm.train.optim.dense import CLICK_OPTIMIZERS, dense_optimizer, network_optimizer
from dlrm.train.trainer import Trainer

SIZES, BATCH = (40, 7, 400), 8


class Parts(NamedTuple):
    """Holds the task of a run, its optimizers, its batches and its settings."""

    task: Any
    optimizers: list
    data: tuple
    average: float | None = None
    config: dict = {}
    device: str = "cpu"


def line(device, kind="adam", average=None, **options):
    """Fits a line, with dropout."""
    task = Line(device=device)
    if kind in CLICK_OPTIMIZERS:
        made = dense_optimizer(kind, task.model.parameters())
    else:
        chosen = NetworkOptimizerConfig(kind, weight_decay=0.1, **options)
        made = network_optimizer(chosen, task.model)
    data = Points(device=device), Points(2, device=device)
    config = {"epochs": 2, "print_freq": 3, "test_freq": 7}
    return Parts(task, [made], data, average, config, device)


def texts(device, kind):
    """Trains a BERT with dropout on shuffled rows, in micro-batches."""
    task = kind(small())
    training = TextLoader(Rows(40), 8, shuffle=True, drop_last=True, window=2)
    data = training, TextLoader(Rows(9, seed=1), 4)
    config = {"epochs": 3, "gradient_accumulation_steps": 2}
    made = task.optimizers(NetworkOptimizerConfig("adamw"))
    return Parts(task, made, data, config=config)


def clicks(device, kind, l2=0.0, **changes):
    """Trains a DLRM."""
    sizes = {"bottom_mlp_sizes": (8,), "top_mlp_sizes": (8, 1)}
    task = Recommendation(DLRMConfig(SIZES, 4, 8, **sizes, **changes), seed=5)
    spec = FeatureSpec.default(".", 4, SIZES)
    data = (
        ClickLoader(SyntheticDataset(spec, split, rows, BATCH, seed=1))
        for split, rows in (("train", BATCH * 16), ("test", 40))
    )
    chosen = OptimizerConfig(
        kind, kind.removeprefix("row_wise_"), embedding_l2=l2, weight_decay=0.02
    )
    return Parts(task, task.optimizers(chosen), tuple(data), config={"test_freq": 7})


BF16 = {"embedding_dtype": "bf16"}
DROPPING = {"batch_norm": True, "dropout": 0.3}
RUNS = {
    **{kind: partial(line, kind=kind) for kind in CLICK_OPTIMIZERS},
    **{k: partial(line, kind=k) for k in ("momentum", "nesterov", "rmsprop_tf", "adamw", "lamb")},
    "lamb of PopART": partial(line, kind="lamb", lamb_flavor="popart"),
    "average": partial(line, average=0.9),
    "pre-training": partial(texts, kind=PreTraining),
    "questions": partial(texts, kind=QuestionAnswering),
    "classification": partial(texts, kind=SequenceClassification),
    "tables, sgd": partial(clicks, kind="sgd", **BF16),
    "tables, adagrad": partial(clicks, kind="adagrad", l2=0.05),
    "tables, adam": partial(clicks, kind="adam", l2=0.05, **BF16),
    "two passes": partial(
        clicks,
        **{"kind": "adam", "l2": 0.05, "interaction_op": "quadratic", "self_ensemble": True},
        **{"wide": True, **DROPPING},
    ),
    "ensemble": partial(clicks, kind="adagrad", l2=0.05, ensemble="dot,quadratic", **DROPPING),
    # Missed steps of a row are taken at once, so its roundings are those of the saved steps.
    "l2, sgd": partial(clicks, kind="sgd", l2=0.05),
    "l2, row_wise_adagrad": partial(clicks, kind="row_wise_adagrad", l2=0.05),
}
CASES = [
    *((name, stop) for name in CLICK_OPTIMIZERS for stop in (4, 10, 13)),
    *((name, 10 if name.startswith("l2") else 11) for name in RUNS if name not in CLICK_OPTIMIZERS),
]


def run(name, device, folder, stop=None, resume=False):
    """Trains; returns the trainer."""
    torch.manual_seed(2 if resume else 1)  # resuming restores the generator
    parts = RUNS[name](device)
    checkpoints = CheckpointDirectory(folder)
    trainer = Trainer(
        parts.task,
        optimizers=parts.optimizers,
        schedule=lambda step: 0.05 / step**0.5,
        config=TrainConfig(checkpoint_freq=5, **parts.config),
        world=World(device=parts.device),
        log=RunLog(quiet=True),
        checkpoints=checkpoints,
        run={"flags": {}},
        ema=parts.average and EMA(parts.task.model, parts.average),
        after_step=lambda step: setattr(trainer, "stop_requested", step == stop),
    )
    if resume:
        trainer.resume(Checkpoint(checkpoints.last()))
    try:
        trainer.fit(*parts.data)
    except StoppedError:
        assert trainer.progress.step == stop
    return trainer


@pytest.mark.parametrize(("name", "stop"), CASES)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(name, stop, tmp_path, device):
    whole = run(name, device, tmp_path / "whole")
    run(name, device, tmp_path / "cut", stop=stop)
    resumed = run(name, device, tmp_path / "cut", resume=True)
    one, two = (trainer.checkpoints.last() for trainer in (whole, resumed))
    files = [f.relative_to(one) for f in one.rglob("*") if f.suffix in (".safetensors", ".bin")]
    assert len(files) >= 3
    for file in files:
        assert (one / file).read_bytes() == (two / file).read_bytes(), file
    assert logged(resumed) == logged(whole)
    assert resumed.progress.best == whole.progress.best


def logged(trainer):
    """Returns the history without times."""
    timed = ("step_time", "throughput")
    return [
        {name: value for name, value in entry.items() if not name.endswith(timed)}
        for entry in trainer.progress.history
    ]
