"""Language: two processes equal one that accumulates two micro-batches."""

import numpy as np
import pytest
import torch
from small_texts import STILL, Rows, small

from dlrm.data.text.loader import TextLoader
from dlrm.distributed import World
from dlrm.tasks.language import PreTraining, QuestionAnswering, SequenceClassification
from dlrm.train.optim.network import NetworkOptimizerConfig
from dlrm.train.precision import LossScaler
from dlrm.train.task import TrainConfig
from dlrm.train.trainer import Trainer

pytestmark = pytest.mark.long
BATCH, STEPS = 7, 4  # unequal parts
KINDS = {"pretrain": PreTraining, "squad": QuestionAnswering, "mrpc": SequenceClassification}


def scorer(starts, ends):
    """Depends on every logit and on its place."""
    inside = np.isfinite(starts)
    places = np.arange(starts.shape[1]) + 1 + np.arange(len(starts))[:, None]
    total = float(((starts[inside] - ends[inside]) * places[inside]).sum())
    return {"f1": total, "exact_match": 0.0}


def train(world: World, parts: int, kind: str, optimizer: str, max_grad_norm: float | None):
    """Losses, weights and metrics of a few steps of a small network."""
    options = {"scorer": scorer} if kind == "squad" else {}
    task = KINDS[kind](small(**STILL), world=world, **options)
    task.model.double()
    trainer = Trainer(
        task,
        optimizers=task.optimizers(NetworkOptimizerConfig(optimizer, weight_decay=0.01)),
        schedule=lambda step: 0.01,
        config=TrainConfig(gradient_accumulation_steps=parts, max_steps=STEPS, print_freq=1),
        world=world,
        scaler=LossScaler(max_grad_norm=max_grad_norm),
    )
    options = {"shuffle": True, "drop_last": True, "window": 2, "world": world}
    summary = trainer.fit(
        TextLoader(Rows(BATCH * STEPS), BATCH, **options), TextLoader(Rows(9, 1), 4, world=world)
    )
    losses = [entry["loss"] for entry in trainer.progress.history if "lr" in entry]
    weights = {name: value.detach().clone() for name, value in task.model.named_parameters()}
    return losses, weights, {k: v for k, v in summary.items() if k.startswith("test_")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("optimizer", "max_grad_norm"), [("momentum", None), ("adamw", 0.5)])
def test_two_processes_equal_two_micro_batches(ranks, kind, optimizer, max_grad_norm):
    losses, weights, metrics = train(World(), 2, kind, optimizer, max_grad_norm)
    for answer in ranks(2).call(train, [(1, kind, optimizer, max_grad_norm)] * 2):
        if isinstance(answer, Exception):
            raise answer
        assert answer[0] == pytest.approx(losses, rel=1e-6)
        # Adam magnifies the rounding of gradients near 0.
        tolerance = 1e-12 if optimizer == "momentum" else 1e-6
        for name, value in weights.items():
            torch.testing.assert_close(answer[1][name], value, atol=tolerance, rtol=tolerance)
        assert answer[2] == pytest.approx(metrics, rel=1e-5)
