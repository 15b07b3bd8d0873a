"""Runs of a click-through model on any number of ranks, compared with one process."""

import functools
from typing import NamedTuple

import pytest
import torch

from dlrm.data.clicks.batch import Shard, Sharded
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.synthetic import SyntheticDataset
from dlrm.distributed import World, gather
from dlrm.model.config import DLRMConfig
from dlrm.ops import join_float32
from dlrm.tasks.recommendation import ClickLoader, Recommendation
from dlrm.train.config import TrainConfig
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.precision import LossScaler
from dlrm.train.trainer import Trainer

SIZES, DIM = (50, 7, 200), 8  # fewer tables than four ranks
BATCH, STEPS = 13, 8  # a prime batch size


class Run(NamedTuple):
    """Model and settings of a run."""

    optimizer: str = "sgd"
    balance: str = "balanced"
    embedding_dtype: str = "fp32"
    hotness: int | None = None
    accumulate: int = 1
    dtype: torch.dtype = torch.float32
    rows: int = BATCH * STEPS
    max_grad_norm: float | None = None
    infinite_on: int = -1  # rank whose gradient overflows at step 3
    auc_threshold: float | None = None
    max_steps: int | None = None
    stop_on: int = -1  # rank that is asked to stop after step 5
    parts: tuple = ()  # names and values of other fields of the architecture
    l2: float = 0.0
    print_freq: int = 1


class Overflowing(Recommendation):
    """Its fourth gradient is infinite on one rank."""

    infinite_on, calls = -1, 0

    def predict(self, batch):
        self.calls += 1
        logits = super().predict(batch)
        if self.calls == 4 and self.world.rank == self.infinite_on:
            logits.register_hook(lambda gradient: gradient * float("inf"))
        return logits


def trainer_of(world, run):
    config = DLRMConfig(
        SIZES,
        4,
        DIM,
        bottom_mlp_sizes=(16, DIM),
        top_mlp_sizes=(16, 8, 1),
        embedding_dtype=run.embedding_dtype,
        placement=run.balance,
        **dict(run.parts),
    )
    task = Overflowing(config, world, run.dtype, seed=5)
    task.infinite_on = run.infinite_on
    dense = run.optimizer.removeprefix("row_wise_")
    trainer = Trainer(
        task,
        optimizers=task.optimizers(
            OptimizerConfig(run.optimizer, dense, embedding_l2=run.l2),
            one_look_up=not run.hotness and run.accumulate == 1,
        ),
        schedule=lambda step: 0.05 / step,
        config=TrainConfig(
            print_freq=run.print_freq,
            gradient_accumulation_steps=run.accumulate,
            test_freq=3 if run.auc_threshold else None,
            auc_threshold=run.auc_threshold,
            max_steps=run.max_steps,
        ),
        world=world,
        scaler=LossScaler(
            torch.tensor(16.0) if run.dtype == torch.float16 else None,
            max_grad_norm=run.max_grad_norm,
        ),
        after_step=lambda step: asked_to_stop(step) if world.rank == run.stop_on else None,
    )

    def asked_to_stop(step):
        trainer.stop_requested |= step == 5

    trainer.log.quiet = True
    return trainer


def batches_of(trainer, run):
    model, world = trainer.task.model, trainer.world
    shard = Shard(world, tuple(model.fields_by_rank[world.rank]))
    beyond = 3 if model.config.hash_indices else 1
    spec = FeatureSpec.default(".", 4, [beyond * size for size in SIZES])
    hotness = run.hotness and [run.hotness]
    return (
        ClickLoader(
            Sharded(SyntheticDataset(spec, split, rows, BATCH, seed=1, hotness=hotness), shard)
        )
        for split, rows in (("train", run.rows), ("test", 100))
    )


def tables_of(trainer):
    """Returns whole tables, joined from the pieces of all ranks."""
    low, found = trainer.parameters.lower_halves(), []
    for part in trainer.parameters.table_parts():
        own = part.rows
        values = part.weight.detach()[own].float()
        if id(part.weight) in low:
            values = join_float32(part.weight.detach()[own], low[id(part.weight)][own])
        found.append((part.table, part.shard, values.clone()))
    dims = (DIM, 1) if trainer.task.model.config.wide else (DIM,)
    tables = [torch.full((rows, dim), torch.nan) for dim in dims for rows in SIZES]
    for theirs in gather(found, trainer.world):
        for table, held, values in theirs:
            tables[table][slice(*held.rows)] = values
    return tables


def train(world, run):
    """Returns losses, final tables and other weights, the metrics, and the scaler's report."""
    trainer = trainer_of(world, run)
    summary = trainer.fit(*batches_of(trainer, run))
    losses = [entry["loss"] for entry in trainer.progress.history if "lr" in entry]
    weights = tables_of(trainer), dict(trainer.parameters.dense())
    return losses, *weights, summary.get("best_auc"), trainer.scaler.report()


@functools.cache
def alone(run):
    return train(World(), run)


def by(ranks, size, function, *arguments):
    results = ranks(size).call(function, [arguments] * size)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def check(ranks, size, run, tolerance=1e-5):
    expected = alone(run._replace(balance="balanced"))
    for found in by(ranks, size, train, run):
        torch.testing.assert_close(found[:3], expected[:3], atol=tolerance, rtol=0)
        assert found[3] == pytest.approx(expected[3], abs=2e-3)
        assert found[4] == expected[4]
