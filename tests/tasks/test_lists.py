"""Training on lists and sample weights, against plain torch in float64, on any number of ranks."""

import math
from typing import NamedTuple

import list_testing
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from op_recorder import OpRecorder
from sklearn.metrics import log_loss, roc_auc_score

from dlrm.data.clicks.batch import Batch, Shard
from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import open_datasets
from dlrm.distributed import World, gather
from dlrm.model.config import DLRMConfig
from dlrm.tasks.recommendation import ClickLoader, Recommendation
from dlrm.train.config import TrainConfig
from dlrm.train.cuda_graph import GraphedCallable
from dlrm.train.optim.base import set_learning_rate
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.trainer import Trainer

SIZES = tuple(list_testing.SIZES.values())
POOLINGS = [("sum", None, "mean"), ("mean",) * 3, None]
ROWS, BATCH, LR = 90, 32, 0.05


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("lists") / "dataset"
    rows = {"train": list_testing.drawn(ROWS, 0), "test": list_testing.drawn(200, 1)}
    list_testing.write(path, rows, weights=True)
    return path


def config(**changes) -> DLRMConfig:
    values = {"bottom_mlp_sizes": (8, 4), "top_mlp_sizes": (8, 1), **changes}
    return DLRMConfig(SIZES, 2, 4, **values)


class Oracle:
    """The model in float64, with dense gradients and loops over rows, tables and ids."""

    def __init__(self, task: Recommendation):
        self.tables = [t.double().clone().requires_grad_() for t in task.model.embeddings.tables()]
        dense = task.parameter_groups()["dense"]
        self.dense = [p.detach().double().clone().requires_grad_() for p in dense]
        self.poolings = task.model.config.poolings

    def vector(self, table: int, ids: list[int], factors: list[float]) -> torch.Tensor:
        total = torch.zeros(4, dtype=torch.float64)
        for i, factor in zip(ids, factors, strict=True):
            total = total + factor * self.tables[table][i]
        return total / len(ids) if ids and self.poolings[table] == "mean" else total

    def logit(self, rows: list_testing.Rows, row: int) -> torch.Tensor:
        """Scores a row: bottom MLP, dots of pairs, top MLP."""
        w0, b0, w1, b1, w2, b2, w3, b3 = self.dense
        x = torch.tensor(rows.numerical[row].astype(np.float64))
        bottom = F.relu(w1 @ F.relu(w0 @ x + b0) + b1)
        vectors = [
            bottom,
            *(self.vector(t, rows.ids[t][row], rows.factors[t][row]) for t in range(len(SIZES))),
        ]
        dots = [vectors[i] @ vectors[j] for i in range(4) for j in range(i)]
        inputs = torch.cat([bottom, torch.stack(dots)])
        return (w3 @ F.relu(w2[:, : len(inputs)] @ inputs + b2) + b3).squeeze()

    def loss(self, rows: list_testing.Rows, begin: int, end: int) -> torch.Tensor:
        losses = [
            float(rows.weights[row])
            * F.binary_cross_entropy_with_logits(
                self.logit(rows, row), torch.tensor(float(rows.labels[row]), dtype=torch.float64)
            )
            for row in range(begin, end)
        ]
        return sum(losses) / float(rows.weights[begin:end].sum())


def dense_gradients(task: Recommendation) -> list[torch.Tensor]:
    """One per table."""
    result = []
    for weight, held in task.table_parameters():
        rows = [piece.num_rows for piece in held.values()]
        result += weight.grad.to_dense().double().split(rows)
    return result


@pytest.mark.parametrize("poolings", POOLINGS, ids=str)
@pytest.mark.parametrize("parts", [1, 2])
def test_losses_and_gradients_are_those_of_float64(directory, poolings, parts):
    rows = list_testing.drawn(ROWS, 0)
    task = Recommendation(config(table_poolings=poolings), seed=3)
    oracle = Oracle(task)
    batch = open_datasets(DataConfig(str(directory), batch_size=BATCH)).train.batch(0)
    assert batch.lengths.amax() == 200
    assert batch.lengths.amin() == 0
    losses = [task.loss(part) for part in task.split(batch, parts)]
    sum(losses).backward()
    expected = oracle.loss(rows, 0, BATCH)
    expected.backward()
    assert sum(losses).item() == pytest.approx(expected.item(), rel=1e-5)
    for found, table in zip(dense_gradients(task), oracle.tables, strict=True):
        torch.testing.assert_close(found, table.grad, rtol=1e-4, atol=1e-6)
    for found, weight in zip(task.parameter_groups()["dense"], oracle.dense, strict=True):
        torch.testing.assert_close(found.grad.double(), weight.grad, rtol=1e-4, atol=1e-6)


def test_ids_are_taken_modulo_their_table_in_lists_too(directory):
    batch = open_datasets(DataConfig(str(directory), batch_size=BATCH)).train.batch(0)
    hashed = config(hash_indices=True, max_table_size=7, table_poolings=POOLINGS[0])
    task = Recommendation(hashed)
    tables = torch.arange(3).repeat(BATCH).repeat_interleave(batch.lengths.flatten().long())
    sizes = torch.tensor([7, 5, 7])[tables]
    folded = batch._replace(categorical=batch.categorical % sizes)
    torch.testing.assert_close(task.predict(batch), task.predict(folded), rtol=0, atol=0)


def test_batches_without_weight_change_nothing(directory):
    batch = open_datasets(DataConfig(str(directory), batch_size=BATCH)).train.batch(0)
    none = batch._replace(weights=torch.zeros(BATCH), total_weight=torch.tensor(0.0).double())
    task = Recommendation(config())
    before = [p.detach().clone() for p in task.model.parameters()]
    optimizers = task.optimizers(OptimizerConfig())
    set_learning_rate(optimizers, LR)
    loss = task.loss(none)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    assert loss.item() == 0
    for was, now in zip(before, task.model.parameters(), strict=True):
        assert torch.equal(was, now)


def test_a_recorded_step_takes_the_weight_of_each_batch(directory):
    """Records as on a GPU, with one id each; the sum of weights must not be a constant."""
    task, random = Recommendation(config()), np.random.default_rng(0)

    def batch(weight):
        ids = torch.from_numpy(random.integers(0, SIZES, (8, 3)))
        weights = torch.full((8,), weight)
        labels, total = torch.ones(8), weights.double().sum()
        return Batch(torch.ones(8, 2), ids, labels, weights=weights, total_weight=total)

    step = GraphedCallable(lambda given: task.loss(given).detach(), OpRecorder())
    for weight in (1.0, 3.0, 0.5, 2.0, 4.0, 0.25, 0.0):
        given = batch(weight)
        assert step(given).item() == pytest.approx(task.loss(given).item(), rel=1e-6)
        assert step(given).item() > 0.1 or not weight


def test_rows_without_weight_count_for_nothing(directory):
    batch = open_datasets(DataConfig(str(directory), batch_size=BATCH)).train.batch(0)
    task = Recommendation(config())
    flipped = torch.where(batch.weights > 0, batch.labels, 1 - batch.labels)
    assert task.loss(batch).item() == task.loss(batch._replace(labels=flipped)).item()


@pytest.mark.parametrize("weighted", [True, False])
def test_metrics_are_those_of_scikit_learn(directory, weighted):
    data = DataConfig(str(directory), test_batch_size=64, sample_weights=weighted)
    task, test = Recommendation(config(table_poolings=POOLINGS[0])), open_datasets(data).test
    rows = list_testing.drawn(200, 1)
    found = task.evaluate(ClickLoader(test))
    logits = torch.cat([task.infer(test.batch(index)) for index in range(len(test))])
    chances, weights = torch.sigmoid(logits.double()).numpy(), rows.weights if weighted else None
    labels, kept = rows.labels, {"sample_weight": weights}
    assert found["auc"] == pytest.approx(roc_auc_score(labels, chances, **kept), abs=1e-12)
    loss = log_loss(labels, chances, **kept)
    assert found["log_loss"] == pytest.approx(loss, rel=1e-9)
    rate = np.average(labels, weights=weights)
    entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
    assert found["normalized_entropy"] == pytest.approx(loss / entropy, rel=1e-9)
    predicted = np.average(chances, weights=weights)
    assert found["calibration"] == pytest.approx(predicted / rate, rel=1e-9)


class Run(NamedTuple):
    """Model and settings of a run."""

    directory: str
    optimizer: str = "sgd"
    embedding_dtype: str = "fp32"
    accumulate: int = 1
    poolings: tuple | None = POOLINGS[0]


def train(world: World, run: Run):
    """Returns the losses, tables, other weights and metrics after three epochs."""
    task = Recommendation(
        config(embedding_dtype=run.embedding_dtype, table_poolings=run.poolings),
        world,
        seed=3,
    )
    shard = Shard(world, tuple(task.model.fields_by_rank[world.rank]))
    data = DataConfig(run.directory, batch_size=BATCH, test_batch_size=64)
    datasets = open_datasets(data, shard)
    dense = run.optimizer.removeprefix("row_wise_")
    trainer = Trainer(
        task,
        optimizers=task.optimizers(OptimizerConfig(run.optimizer, dense)),
        schedule=lambda step: LR / step,
        config=TrainConfig(epochs=3, print_freq=1, gradient_accumulation_steps=run.accumulate),
        world=world,
    )
    losses = []
    trainer.log.step = lambda epoch, step, values, number: losses.append(values.get("loss"))
    summary = trainer.fit(ClickLoader(datasets.train), ClickLoader(datasets.test))
    own = zip(
        task.model.fields_by_rank[world.rank],
        (table.clone() for table in task.model.embeddings.tables()),
        strict=True,
    )
    tables = {n: table for part in gather(dict(own), world) for n, table in part.items()}
    return losses, tables, dict(trainer.parameters.dense()), summary


def check(expected, result):
    assert not isinstance(result, Exception), result
    known = [loss for loss in expected[0] if loss is not None]
    assert [loss for loss in result[0] if loss is not None] == pytest.approx(known, rel=1e-4)
    assert len(known) > 5
    torch.testing.assert_close(result[1], expected[1], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(result[2], expected[2], atol=2e-5, rtol=1e-4)
    for name in ("best_auc", "test_log_loss", "test_calibration"):
        assert result[3][name] == pytest.approx(expected[3][name], rel=1e-3)


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (1, {"accumulate": 5}),
        (2, {"optimizer": "adam", "poolings": None}),
        (2, {"optimizer": "row_wise_adagrad", "accumulate": 2}),
        (4, {"optimizer": "adagrad"}),
        (4, {"embedding_dtype": "bf16", "accumulate": 5}),
    ],
    ids=str,
)
def test_losses_and_weights_are_those_of_one_process(directory, ranks, size, changes):
    run = Run(str(directory))._replace(**changes)
    expected = train(World(), run._replace(accumulate=1))
    results = ranks(size).call(train, [(run,)] * size) if size > 1 else [train(World(), run)]
    for result in results:
        check(expected, result)


@pytest.mark.parametrize("optimizer", ["sgd", "row_wise_adagrad"])
def test_bfloat16_tables_are_updated_as_those_of_float32(directory, optimizer):
    whole, halves = (
        Recommendation(config(embedding_dtype=dtype, table_poolings=POOLINGS[0]), seed=3)
        for dtype in ("fp32", "bf16")
    )
    batch = open_datasets(DataConfig(str(directory), batch_size=BATCH)).train.batch(0)
    for task in (whole, halves):
        (tables, _) = optimizers = task.optimizers(OptimizerConfig(optimizer))
        set_learning_rate(optimizers, LR)
        task.loss(batch).backward()
        tables.step()
    for exact, found in zip(
        whole.model.embeddings.tables(), halves.model.embeddings.tables(), strict=True
    ):
        torch.testing.assert_close(found, exact, atol=2e-3, rtol=2**-7)
