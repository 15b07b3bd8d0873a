"""Training with many processes equals training with one, wherever the tables are."""

import functools
import re
from typing import NamedTuple

import pytest
import torch

from dlrm.data.clicks.batch import Shard, Sharded
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.synthetic import SyntheticDataset
from dlrm.distributed import OtherRankError, World, gather
from dlrm.model.config import DLRMConfig
from dlrm.tasks.recommendation import Batches, Recommendation
from dlrm.train.log import StoppedError
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.precision import LossScaler
from dlrm.train.task import TrainConfig
from dlrm.train.trainer import Trainer

pytestmark = pytest.mark.long
SIZES = (50, 7, 200)  # fewer tables than four ranks
BATCH, STEPS = 13, 20  # a prime batch size


class Run(NamedTuple):
    """Model and settings of a run."""

    embedding_type: str = "joint_fused"
    optimizer: str = "sgd"
    placement: str = "balanced"
    embedding_dtype: str = "fp32"
    hotness: int | None = None
    accumulate: int = 1
    dtype: torch.dtype = torch.float32
    rows: int = BATCH * STEPS
    infinite_on: int = -1  # rank whose gradient overflows at step 3
    interaction_op: str = "cuda_dot"
    auc_threshold: float | None = None
    max_steps: int | None = None
    stop_on: int = -1  # rank that is asked to stop after step 5
    parts: tuple = ()  # names and values of other fields of the architecture
    l2: float = 0.0


class Overflowing(Recommendation):
    """Its fourth gradient is infinite on one rank."""

    infinite_on, calls = -1, 0

    def predict(self, batch):
        self.calls += 1
        logits = super().predict(batch)
        if self.calls == 4 and self.world.rank == self.infinite_on:
            logits.register_hook(lambda gradient: gradient * float("inf"))
        return logits


def train(world: World, run: Run):
    """Returns the losses, the tables and the other weights after 20 steps, and the metrics."""
    config = DLRMConfig(
        SIZES,
        4,
        8,
        bottom_mlp_sizes=(16, 8),
        top_mlp_sizes=(16, 8, 1),
        embedding_type=run.embedding_type,
        embedding_dtype=run.embedding_dtype,
        placement=run.placement,
        interaction_op=run.interaction_op,
        **dict(run.parts),
    )
    task = Overflowing(config, world, run.dtype, seed=5)
    task.infinite_on = run.infinite_on
    shard = Shard(world, tuple(task.model.tables_by_rank[world.rank]))
    spec = FeatureSpec.default(".", 4, SIZES)
    hotness = run.hotness and [run.hotness]
    train_set, test_set = (
        Batches(Sharded(SyntheticDataset(spec, split, rows, BATCH, seed=1, hotness=hotness), shard))
        for split, rows in (("train", run.rows), ("test", 100))
    )
    half = run.dtype == torch.float16
    trainer = Trainer(
        task,
        optimizers=task.optimizers(
            OptimizerConfig(run.optimizer, _dense(run.optimizer), embedding_l2=run.l2),
            one_look_up=not run.hotness and run.accumulate == 1,
        ),
        schedule=lambda step: 0.05 / step,
        config=TrainConfig(
            print_freq=1,
            gradient_accumulation_steps=run.accumulate,
            test_freq=3 if run.auc_threshold else None,
            auc_threshold=run.auc_threshold,
            max_steps=run.max_steps,
        ),
        world=world,
        scaler=LossScaler(torch.tensor(16.0)) if half else None,
        beat=lambda step: asked_to_stop(step) if world.rank == run.stop_on else None,
    )

    def asked_to_stop(step):
        trainer.stop_requested |= step == 5

    trainer.log.quiet = True
    summary = trainer.fit(train_set, test_set)
    losses = [entry["loss"] for entry in trainer.progress.history if "lr" in entry]
    own = zip(task.model.tables_by_rank[world.rank], task.model.embeddings.tables(), strict=True)
    tables = {number: table for part in gather(dict(own), world) for number, table in part.items()}
    for weight, numbered in task.model.wide.table_parameters() if config.wide else []:
        wide = dict(zip(numbered, weight.detach().split([*numbered.values()]), strict=True))
        for part in gather(wide, world):
            tables |= part
        assert set(tables) == set(range(6))
    return losses, tables, trainer.parameters.dense(), summary, trainer.scaler.report()


def _dense(optimizer: str) -> str:
    return optimizer.removeprefix("row_wise_")


@functools.cache
def alone(run: Run):
    return train(World(), run)


def check(ranks, size: int, run: Run):
    expected, results = (
        alone(run._replace(placement="balanced")),
        ranks(size).call(train, [(run,)] * size),
    )
    for result in results:
        if isinstance(result, Exception):
            raise result
        torch.testing.assert_close(result[0], expected[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(result[1], expected[1], atol=1e-5, rtol=0)
        torch.testing.assert_close(dict(result[2]), dict(expected[2]), atol=1e-5, rtol=0)
        assert result[3]["best_auc"] == pytest.approx(expected[3]["best_auc"], abs=2e-3)
        assert result[4] == expected[4]


NATIVE = [("joint_fused", kind) for kind in ("sgd", "adagrad", "row_wise_adagrad", "adam")]
TORCH = [
    (layout, kind)
    for layout in ("joint_sparse", "joint", "multi_table")
    for kind in ("sgd", "adagrad", "adam")
]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("placement", ["balanced", "nvidia"])
@pytest.mark.parametrize(("layout", "optimizer"), NATIVE + TORCH)
def test_losses_and_weights_are_those_of_one_process(ranks, size, placement, layout, optimizer):
    check(ranks, size, Run(layout, optimizer, placement))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "run",
    [
        Run(embedding_dtype="bf16"),
        Run(hotness=4),
        Run("multi_table", hotness=4),
        Run(interaction_op="cat"),
        Run(accumulate=2),
        Run(accumulate=3, hotness=4),
        Run(accumulate=100),
        Run(rows=BATCH * 3 + 1),  # a last batch of one sample
        Run(optimizer="adam", rows=BATCH * 3 + 1),
        *(Run(optimizer=kind, parts=(("wide", True),)) for kind in ("sgd", "adam")),
        Run("multi_table", hotness=4, parts=(("wide", True),)),
        Run(embedding_dtype="bf16", parts=(("wide", True), ("numerical_embedding", "piecewise"))),
        Run(parts=(("numerical_embedding", "bins"), ("numerical_bins", 4))),
        Run(parts=(("numerical_embedding", "periodic"),)),
        Run(interaction_op="cuda_dot,dcn", parts=(("cross_rank", 3), ("wide", True))),
        Run(interaction_op="dcn", accumulate=2, parts=(("cross_structure", "parallel"),)),
        Run(optimizer="adam", accumulate=2, parts=(("ensemble", 3), ("wide", True))),
        Run(l2=0.1, accumulate=2, parts=(("wide", True),)),
        Run(optimizer="adam", l2=0.1, hotness=4),
        Run(optimizer="adagrad", l2=0.1, embedding_dtype="bf16"),
    ],
    ids=str,
)
def test_so_are_other_ways_to_train(ranks, size, run):
    check(ranks, size, run)


def test_half_precision_works_where_a_rank_has_no_table(ranks):
    results = ranks(4).call(train, [(Run(dtype=torch.float16),)] * 4)
    assert [len(result[0]) for result in results] == [STEPS - 1] * 4


@pytest.mark.parametrize("infinite_on", [0, 1])
def test_an_overflow_of_one_rank_skips_the_step_on_all(ranks, infinite_on):
    run = Run(dtype=torch.float16, infinite_on=infinite_on)
    first, second = ranks(2).call(train, [(run,)] * 2)
    assert first[4] == second[4] == "  skipped: 1"
    torch.testing.assert_close(first[1:3], second[1:3], atol=0, rtol=0)
    assert all(table.isfinite().all() for table in first[1].values())


def test_a_run_is_bitwise_repeatable(ranks):
    run = Run(optimizer="adam")
    once, again = (ranks(3).call(train, [(run,)] * 3)[0] for _ in range(2))
    assert once[0] == again[0]
    torch.testing.assert_close(once[1:3], again[1:3], atol=0, rtol=0)


def test_ranks_leave_together_at_a_threshold_and_after_the_last_step(ranks):
    for run, steps in ((Run(auc_threshold=0.01), 3), (Run(max_steps=7), 7)):
        for result in ranks(3).call(train, [(run,)] * 3):
            assert len(result[0]) == steps - 1  # the first has no line


@pytest.mark.parametrize("stop_on", [0, 2])
def test_ranks_leave_together_when_one_is_asked_to_stop(ranks, stop_on):
    results = ranks(3).call(train, [(Run(stop_on=stop_on),)] * 3)
    assert {type(result) for result in results} == {StoppedError}
    (said,) = {str(result) for result in results}
    assert re.match("stopped after step [67]; nothing is saved", said)


@pytest.mark.parametrize("infinite_on", [0, 1])
def test_a_nan_of_one_rank_ends_all_and_is_said_once(ranks, infinite_on):
    first, second = ranks(2).call(train, [(Run(infinite_on=infinite_on),)] * 2)
    assert isinstance(first, FloatingPointError)
    assert isinstance(second, OtherRankError)
