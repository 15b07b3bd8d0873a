"""Click-through prediction as the trainer sees it: batches that are computed in parts."""

import pytest
import torch

from dlrm.data.batch import Batch
from dlrm.distributed import World
from dlrm.model.dlrm import DLRMConfig
from dlrm.tasks import recommendation
from dlrm.tasks.recommendation import Recommendation
from dlrm.train.optim import OptimizerConfig, set_learning_rate

SIZES, BATCH = (50, 7, 200), 13


def batch(hotness: int = 1, size: int = BATCH) -> Batch:
    random = torch.Generator().manual_seed(0)
    numerical = torch.randn(size, 4, generator=random)
    labels = torch.randint(2, (size,), generator=random).float()
    limits = torch.tensor(SIZES).expand(size, -1)
    if hotness == 1:
        ids = (torch.rand(limits.shape, generator=random) * limits).long()
        return Batch(numerical, ids, labels)
    lengths = torch.randint(hotness + 1, limits.shape, generator=random)
    limits = limits.repeat_interleave(lengths.flatten())
    ids = (torch.rand(limits.shape, generator=random) * limits).long()
    return Batch(numerical, ids, labels, lengths)


def task(device: str = "cpu", **changes) -> Recommendation:
    config = DLRMConfig(SIZES, 4, 8, bottom_mlp_sizes=(8,), top_mlp_sizes=(16, 1), **changes)
    return Recommendation(config, World(device=device))


@pytest.mark.parametrize("hotness", [1, 5])
@pytest.mark.parametrize("parts", [2, 4, 100])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
def test_accumulation_equals_one_batch(hotness, parts, kind, device):
    whole, cut = task(device), task(device)
    for one, count in ((whole, 1), (cut, parts)):
        optimizers = one.optimizers(OptimizerConfig(kind, kind))
        set_learning_rate(optimizers, 0.01)
        for _ in range(3):
            given = batch(hotness).map(lambda tensor: tensor.to(device))
            pieces = one.split(given, count)
            assert len(pieces) == min(count, BATCH)
            losses = [one.loss(piece) for piece in pieces]
            sum(losses).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            one.last_loss = sum(losses).item()
    assert cut.last_loss == pytest.approx(whole.last_loss, rel=1e-5)
    for actual, expected in zip(cut.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)


def table_sizes(task: Recommendation, one_look_up: bool):
    optimizers = task.optimizers(OptimizerConfig(), one_look_up)
    return optimizers[0].param_groups[0]["table_sizes"]


@pytest.mark.parametrize("max_table_size", [None, 40])
def test_the_row_optimizer_knows_the_tables_of_its_own_process(max_table_size):
    hashed = {"hash_indices": max_table_size is not None, "max_table_size": max_table_size}
    config = DLRMConfig(SIZES, 4, 8, bottom_mlp_sizes=(8,), top_mlp_sizes=(16, 1), **hashed)
    rows = [min(size, max_table_size or size) for size in SIZES]
    assert table_sizes(Recommendation(config), one_look_up=True) == rows
    assert table_sizes(Recommendation(config), one_look_up=False) is None
    for rank in (0, 1):
        part = Recommendation(config, World(rank, 2))
        own = [rows[table] for table in part.model.tables_by_rank[rank]]
        assert table_sizes(part, one_look_up=True) == own
        assert 0 < len(own) < len(rows)


def test_every_sample_is_in_one_micro_batch():
    given = batch(hotness=3)
    parts = given.split(4)
    assert [len(part.labels) for part in parts] == [3, 3, 3, 4]
    for name in ("numerical", "categorical", "labels", "lengths"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(given, name))
    assert {part.global_size for part in parts} == {BATCH}
    assert [p.global_size for part in parts for p in part.split(2)] == [BATCH] * 8


@pytest.mark.parametrize(
    ("tables", "updates", "vary"),
    [
        ({}, {}, True),
        ({"embedding_type": "joint_sparse"}, {}, True),
        ({}, {"embedding_optimizer": "adagrad"}, False),
        ({"embedding_dtype": "bf16"}, {}, False),
        ({}, {"freeze_embeddings": True}, False),
    ],
)
def test_rows_gradients_are_added_as_they_come_by_sgd_of_float32_on_cuda(
    tables, updates, vary, monkeypatch
):
    monkeypatch.setattr(recommendation, "cuda_kernels_available", lambda: True)
    trained, config = task(**tables), OptimizerConfig(**updates)
    assert not trained.updates_vary(config)
    trained.world = World(device="cuda")
    assert trained.updates_vary(config) == vary


def test_without_kernels_plain_torch_adds_rows_gradients_as_they_come(monkeypatch):
    monkeypatch.setattr(recommendation, "cuda_kernels_available", lambda: False)
    for layout, vary in (("joint_fused", True), ("joint_sparse", False)):
        trained = task(embedding_type=layout)
        trained.world = World(device="cuda")
        assert trained.updates_vary(OptimizerConfig("adagrad")) == vary
