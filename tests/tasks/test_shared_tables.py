"""Fields that share a table look up one set of rows, whose gradients are those of all fields."""

import numpy as np
import pytest
import torch

from dlrm.data import layout
from dlrm.data.bags import Jagged, ListField
from dlrm.data.clicks.batch import Shard
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.readers import SplitDataset
from dlrm.data.clicks.writer import SplitWriter
from dlrm.distributed import World, gather
from dlrm.model.config import DLRMConfig
from dlrm.model.dlrm import DLRM
from dlrm.tasks.recommendation import Recommendation
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.state import Parameters
from dlrm.train.gradient_sum import GradientSum
from dlrm.train.optim.base import set_learning_rate
from dlrm.train.optim.config import OptimizerConfig

FIELDS = {"item": 50, "user": 7, "history": 50}
TABLES, BATCH, DIM = (0, 1, 0), 12, 4


def config(users=7, **changes):
    values = {"bottom_mlp_sizes": (8, DIM), "top_mlp_sizes": (8, 1), "field_tables": TABLES}
    values["embedding_dim"] = DIM
    sizes = {**FIELDS, "user": users}
    return DLRMConfig(tuple(sizes.values()), 2, **{**values, **changes})


def write(directory, lists=True, users=7, rows=5 * BATCH, seed=0):
    """Writes a dataset whose items and histories share a table."""
    random = np.random.default_rng(seed)
    tables = {"item": "shown", "history": "shown"}
    spec = FeatureSpec.named(
        directory / layout.FEATURE_SPEC,
        "label",
        ["a", "b"],
        {**FIELDS, "user": users},
        ["train", "test"],
        lists={"history": ListField(6)} if lists else {},
        tables=tables,
    )
    for split in ("train", "test"):
        ids = [random.integers(0, size, rows) for size in (50, users, 50)]
        if lists:
            lengths = random.integers(0, 7, rows)
            ids[2] = Jagged(random.integers(0, 50, lengths.sum()), lengths)
        numerical = random.normal(size=(rows, 2)).astype(np.float16)
        with SplitWriter(spec, split) as writer:
            writer.write(random.integers(0, 2, rows), numerical, ids)
    spec.save()
    return FeatureSpec.load(directory)


def tables_of(model):
    return [table.clone() for table in model.embeddings.tables()]


def gradients(task):
    found = []
    for weight, held in task.table_parameters():
        rows = [shard.num_rows for shard in held.values()]
        found += weight.grad.to_dense().split(rows)
    return found


@pytest.mark.parametrize("lists", [True, False])
def test_it_is_a_model_of_equal_tables_with_summed_gradients(tmp_path, lists):
    spec = write(tmp_path, lists)
    batch = SplitDataset(spec, "train", BATCH).batch(0)
    shared = Recommendation(config(wide=True), seed=3)
    apart = Recommendation(config(wide=True, field_tables=None), seed=3)
    tables = tables_of(shared.model)
    with torch.no_grad():
        for field, table in enumerate(apart.model.embeddings.tables()):
            table.copy_(tables[TABLES[field]])
    torch.testing.assert_close(shared.predict(batch), apart.predict(batch))
    for task in (shared, apart):
        task.loss(batch).backward()
    found, theirs = gradients(shared), gradients(apart)
    expected = [theirs[0] + theirs[2], theirs[1], theirs[3] + theirs[5], theirs[4]]
    for own, table in zip(found, expected, strict=True):
        assert own.abs().sum() > 0
        torch.testing.assert_close(own, table)


def stepped(world, folder, placement, saved, parts):
    """Takes three steps; returns the losses, and saves a checkpoint."""
    task = Recommendation(config(wide=True, placement=placement, **parts), world, seed=2)
    model, losses = task.model, []
    shard = Shard(world, tuple(model.fields_by_rank[world.rank]))
    data = SplitDataset(FeatureSpec.load(folder), "train", 11, shard=shard)
    (*optimizers,) = task.optimizers(OptimizerConfig("adagrad", "sgd"))
    set_learning_rate(optimizers, 0.3)
    summed = GradientSum(task.parameter_groups()["dense"], world)
    for index in range(3):
        loss = task.loss(data.batch(index))
        losses.append(sum(gather(loss.item(), world)))
        model.zero_grad()
        summed.expect()
        loss.backward()
        summed.wait()
        for one in optimizers:
            one.step()
    parameters = Parameters(model, model.table_parameters())
    Checkpoint.save(saved, parameters, {"flags": {}}, {"step": 3}, world=world)
    return losses


def check_two_ranks(ranks, folder, placement, lists, **parts):
    """Checks that two ranks give the losses and weights of one."""
    write(folder / "data", lists, parts.get("users", 7))
    alone, both = folder / "alone", folder / "both"
    expected = stepped(World(), folder / "data", placement, alone, parts)
    arguments = (folder / "data", placement, both, parts)
    for losses in ranks(2).call(stepped, [arguments] * 2):
        assert losses == pytest.approx(expected, abs=1e-5)
    assert expected[2] != pytest.approx(expected[1], abs=1e-3)
    assert len(list((both / "tables").glob("?.bin"))) == 4  # two of vectors, two wide
    models = [DLRM(config(wide=True, **parts)) for _ in range(2)]
    for model, saved in zip(models, (alone, both), strict=True):
        Checkpoint(saved).load(Parameters(model, model.table_parameters()))
    weights = [dict(model.named_parameters()) for model in models]
    torch.testing.assert_close(*weights, atol=2e-5, rtol=0)
    return models[0]


@pytest.mark.parametrize(("placement", "lists"), [("balanced", False), ("auto", True)])  # split
def test_two_ranks_train_as_one(ranks, tmp_path, placement, lists):
    check_two_ranks(ranks, tmp_path, placement, lists)


ATTENDED = {"table_poolings": (None, None, "attention"), "field_targets": (None, None, 0)}


@pytest.mark.parametrize("users", [7, 70])  # 70: auto splits their table, and not the attended one
def test_two_ranks_attend_as_one(ranks, tmp_path, users):
    split = config(users, placement="auto", **ATTENDED).placed(2)
    assert [shard.table for shard in split.shards if not shard.is_whole] == [1, 1] * (users == 70)
    model = check_two_ranks(ranks, tmp_path, "auto", True, users=users, **ATTENDED)
    initial = DLRM(config(users, wide=True, **ATTENDED), seed=2).attention["2"]
    assert not torch.equal(model.attention["2"].weight, initial.weight)


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ((0, 0, 1), r"field 1: expected the next number, 1, or that of a table of 7 rows"),
        ((0, 2, 0), r"field 1: expected the next number, 1, .* got 2"),
        ((0, 1), r"expected those of 3 fields, got 2"),
    ],
)
def test_tables_that_do_not_fit_are_named(tables, said):
    with pytest.raises(ValueError, match=said):
        config(field_tables=tables)


def test_a_specification_of_other_rows_is_refused(tmp_path):
    spec = write(tmp_path)
    text = spec.path.read_text().replace("cardinality: 50", "cardinality: 51", 1)
    spec.path.write_text(text)
    with pytest.raises(ValueError, match=r"expected the cardinality of .* shares table 'shown'"):
        FeatureSpec.load(tmp_path)
