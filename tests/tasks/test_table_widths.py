"""Tables with fewer columns than the interaction, whose vectors are projected."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest
import torch
from click_runs import BATCH, SIZES, Run, check, trainer_of

import dlrm
from dlrm.data.clicks.batch import Batch
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.transform.schema import Schema
from dlrm.distributed import World
from dlrm.distributed.placement import Piece
from dlrm.model.config import DLRMConfig, check_dims
from dlrm.model.dlrm import DLRM
from dlrm.serving.network.exportable import exportable
from dlrm.serving.network.quantize import quantize_tables
from dlrm.tasks.recommendation import Recommendation
from dlrm.train.checkpoints.checkpoint import (
    Parameters,
    load_checkpoint,
    read_config,
    save_checkpoint,
)
from dlrm.train.checkpoints.nvidia import read_nvidia, write_nvidia
from dlrm.train.checkpoints.saved_model import read_saved
from dlrm.train.optim.base import set_learning_rate
from dlrm.train.optim.config import OptimizerConfig

ROWS, DIM = (50, 7, 200, 7), 8
DIMS = (None, 3, 4, 3)  # tables 1 and 3 are one
TABLES = (0, 1, 2, 1)
TABLES_OF = ("embeddings", "wide")
PARTS = [
    {},
    {"wide": True, "interaction_op": "dot,dcn", "ensemble": 2},
    {"hash_indices": True, "max_table_size": 40},
    {"table_poolings": ("mean", None, "mean", None), "interaction_op": "cat"},
]


def config(**changes):
    values = {"bottom_mlp_sizes": (8, DIM), "top_mlp_sizes": (8, 1), "field_dims": DIMS}
    return DLRMConfig(ROWS, 2, DIM, **{**values, "field_tables": TABLES, **changes})


def batch(lists=False, rows=12):
    random = torch.Generator().manual_seed(1)
    numerical, labels = torch.rand(rows, 2, generator=random), torch.arange(rows) % 2.0
    counts = torch.randint(4, (rows, 4), generator=random) if lists else torch.ones(rows, 4)
    sizes = torch.tensor(ROWS).expand(rows, 4).flatten()
    sizes = sizes.repeat_interleave(counts.flatten().long())
    ids = (torch.rand(len(sizes), generator=random) * sizes).long()
    if not lists:
        return Batch(numerical, ids.view(rows, 4), labels)
    return Batch(numerical, ids, labels, counts)


def by_table(model):
    """Returns the rows of each table, and those of the wide term."""
    held = {}
    for weight, pieces in model.table_parameters():
        sizes = [piece.num_rows for piece in pieces.values()]
        held.update(zip(pieces, weight.split(sizes), strict=True))
    return [held[table] for table in sorted(held)]


def of_whole_width(task, **parts):
    """Returns a model with tables of the interaction's width that are the products."""
    whole = Recommendation(config(**parts, field_dims=None), seed=5)
    dense = {n: p for n, p in task.model.named_parameters() if not n.startswith(TABLES_OF)}
    with torch.no_grad():
        for name, parameter in whole.model.named_parameters():
            parameter.copy_(dense.get(name, parameter))
        for table, (rows, own) in enumerate(
            zip(*map(by_table, (whole.model, task.model)), strict=True)
        ):
            rows.copy_(task.model.projections.whole(table, own))
    return whole


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_it_is_a_model_of_products_of_tables_and_matrices(parts, lists):
    task = Recommendation(config(**parts), seed=5)
    whole, rows = of_whole_width(task, **parts), batch(lists)
    shapes = [tuple(table.shape) for table in by_table(task.model)[:3]]
    limit = parts.get("max_table_size", 1000)
    assert shapes == [(min(rows, limit), dim) for rows, dim in ((50, 8), (7, 3), (200, 4))]
    torch.testing.assert_close(task.predict(rows), whole.predict(rows))
    with torch.no_grad():
        torch.testing.assert_close(task.infer(rows), whole.infer(rows))
    losses = [one.loss(rows) for one in (task, whole)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    ((weight, _),) = whole.model.embeddings.table_parameters()
    expected = weight.grad.to_dense().split([shape[0] for shape in shapes])
    found, tables = {}, by_table(task.model)
    for weight, held in task.model.embeddings.table_parameters():
        sizes = [piece.num_rows for piece in held.values()]
        found.update(zip(held, weight.grad.to_dense().split(sizes), strict=True))
    matrices = dict(task.model.projections.named_parameters())
    assert sorted(matrices) == ["1", "2"]
    torch.testing.assert_close(found[0], expected[0])
    for name, matrix in matrices.items():
        table = int(name)
        torch.testing.assert_close(found[table], expected[table] @ matrix.detach().T)
        torch.testing.assert_close(matrix.grad, tables[table].detach().T @ expected[table])


def test_native_gradients_are_those_of_autograd():
    """`accumulate` computes them without a graph of the network."""
    tasks = [Recommendation(config(), seed=5) for _ in range(2)]
    tasks[0].loss(batch()).backward()
    tasks[1]._gradients(tasks[1].model.gradient_parameters(batch().numerical), batch())
    for one, two in zip(*(task.model.parameters() for task in tasks), strict=True):
        torch.testing.assert_close(one.grad.to_dense(), two.grad.to_dense())


def test_projections_start_with_the_variance_of_the_table():
    sizes = (20_000, 20_000)
    model = DLRM(DLRMConfig(sizes, 1, 64, bottom_mlp_sizes=(64,), field_dims=(None, 16)))
    wide, narrow = by_table(model)
    assert narrow.shape == (20_000, 16)
    ratio = model.projections.whole(1, narrow).var() / wide.var()
    assert ratio.item() == pytest.approx(1, abs=0.1)


WIDTHS = ("field_dims", (2, None, 4))


def test_missed_steps_of_l2_reach_the_rows_of_every_width():
    """Rows that catch up at their look-up have the bits of rows that do so at every step."""
    chosen = OptimizerConfig("adam", "adam", embedding_l2=0.1)
    tasks = [Recommendation(config(wide=True), seed=5) for _ in range(2)]
    made = [task.optimizers(chosen) for task in tasks]
    for step in range(6):
        for lazy, (task, optimizers) in enumerate(zip(tasks, made, strict=True)):
            set_learning_rate(optimizers, 0.05)
            if not lazy:
                optimizers[0].finish_updates()
            rows = batch(lists=True, rows=3 + step)
            task.loss(rows).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for optimizers in made:
        optimizers[0].finish_updates()
    for one, two in zip(*(task.model.parameters() for task in tasks), strict=True):
        assert torch.equal(one, two)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "run",
    [
        Run(optimizer="adam", parts=(WIDTHS, ("wide", True))),
        Run(hotness=4, parts=(WIDTHS,)),
        Run(optimizer="adagrad", accumulate=2, embedding_dtype="bf16", parts=(WIDTHS,)),
        Run(optimizer="adam", l2=0.1, hotness=3, parts=(WIDTHS, ("wide", True))),
        Run(rows=BATCH * 3 + 1, parts=(WIDTHS,)),
    ],
    ids=str,
)
def test_ranks_train_as_one(ranks, size, run):
    check(ranks, size, run)


def piece(table, rank, rows=None, columns=None):
    dims = (2, 8, 4)
    shape = SIZES[table], dims[table]
    return Piece(table, rows or (0, shape[0]), columns or (0, shape[1]), rank, shape)


DIVIDED = {
    "columns": [piece(0, 0), *(piece(1, i, None, (4 * i, 4 * i + 4)) for i in (0, 1)), piece(2, 1)],
    "rows": [piece(0, 1), piece(1, 0), piece(2, 0, (0, 60)), piece(2, 1, (60, 200))],
    "copies": [piece(0, None), piece(1, None), piece(2, 1)],
}


def test_half_precision_trains():
    trainer = trainer_of(World(), Run(dtype=torch.bfloat16, parts=(WIDTHS,)))
    loss = trainer.task.loss(
        Batch(torch.rand(5, 4), torch.zeros(5, 3, dtype=torch.long), torch.ones(5))
    )
    loss.backward()
    full = trainer_of(World(), Run(parts=(WIDTHS,)))
    assert loss.item() == pytest.approx(0.69, abs=0.3)
    for name, parameter in full.task.model.projections.named_parameters():
        assert parameter.shape == trainer.task.model.projections.get_parameter(name).grad.shape


def saved(task, folder, optimizers=()):
    parameters = Parameters(task.model, task.model.table_parameters(), optimizers)
    flags = {"interaction_op": "cuda_dot", "embedding_dim": DIM}
    save_checkpoint(folder, parameters, {"flags": flags, "dataset": {}}, {"step": 3})
    return read_saved(folder)


def test_a_checkpoint_has_tables_of_their_widths_and_resumes(tmp_path):
    chosen = OptimizerConfig("adam", "adam")
    tasks = [Recommendation(config(wide=True), seed=seed) for seed in (5, 6)]
    made = [task.optimizers(chosen) for task in tasks]

    def step(task, optimizers):
        set_learning_rate(optimizers, 0.05)
        for optimizer in optimizers:
            optimizer.zero_grad()
        task.loss(batch(lists=True)).backward()
        for optimizer in optimizers:
            optimizer.step()

    step(tasks[0], made[0])
    found = saved(tasks[0], tmp_path / "step", made[0])
    assert [(t.rows, t.dim) for t in found.tables] == [
        *((50, 8), (7, 3), (200, 4)),
        *((50, 1), (7, 1), (200, 1)),
    ]
    parameters = Parameters(tasks[1].model, tasks[1].model.table_parameters(), made[1])
    load_checkpoint(tmp_path / "step", parameters, resume=True)
    for task, optimizers in zip(tasks, made, strict=True):
        step(task, optimizers)
    for one, two in zip(*(task.model.parameters() for task in tasks), strict=True):
        assert torch.equal(one, two)
    other = DLRM(config(wide=True, field_dims=None))
    with pytest.raises(ValueError, match=r"table 1: \[7, 3\] in the checkpoint, \[7, 8\] here"):
        load_checkpoint(tmp_path / "step", Parameters(other, other.table_parameters()))


def test_nvidias_directory_has_the_products(tmp_path):
    parts = {"field_tables": None, "field_dims": (None, 3, 4, 2)}
    task = Recommendation(config(**parts), seed=5)
    write_nvidia(saved(task, tmp_path / "step"), tmp_path / "nvidia")
    model = DLRM(config(field_tables=None, field_dims=None))
    load_checkpoint(tmp_path / "nvidia", Parameters(model, model.table_parameters()))
    rows = batch()
    torch.testing.assert_close(model(rows.numerical, rows.categorical), task.predict(rows))
    assert {table.dim for table in read_nvidia(tmp_path / "nvidia").tables} == {DIM}


@pytest.mark.parametrize("lists", [False, True])
def test_exported_models_have_tables_of_the_interactions_width(lists):
    task, rows = Recommendation(config(wide=True), seed=5), batch(lists)
    tables = quantize_tables(task.model, "fp32")
    assert tables.shape == (257, DIM)
    arrays = (rows.numerical, rows.categorical, *([rows.lengths] if lists else []))
    exported = exportable(task.model, tables)
    torch.testing.assert_close(exported(*arrays).flatten(), task.predict(rows))


def test_quantized_tables_are_the_rounded_products():
    model = Recommendation(config(), seed=5).model
    tables = quantize_tables(model, "fp16")
    assert not tables.requires_grad
    torch.testing.assert_close(tables, quantize_tables(model, "fp32").half(), rtol=0, atol=0)


def test_impossible_widths_are_refused_by_name():
    names = ["user", "item"]
    with pytest.raises(ValueError, match="field item: embedding_dim 32: .* --embedding_dim 16.*32"):
        check_dims(names, (8, 32), None, 16)
    with pytest.raises(
        ValueError, match="field user: .* list with pooling: attention; leave .* at all"
    ):
        check_dims(names, (8, None), ("attention", None), 16)
    check_dims(names, (16, 8), ("attention", None), 16)
    for dims in ((9, None, None, None), (None, 3, 4, 2), (None, 3)):
        with pytest.raises(ValueError, match="field_dims: "):
            config(field_dims=dims)
    with pytest.raises(ValueError, match="--embedding_type joint: expected joint_fused"):
        config(embedding_type="joint")


SCHEMA = {
    "version": 1,
    "label": "y",
    "numerical": ["x"],
    "categorical": [
        {"column": "user", "type": "integer", "embedding_dim": 3},
        {"column": "item", "type": "integer"},
    ],
}


def test_a_schema_says_widths_and_a_loaded_model_has_them(tmp_path):
    random = np.random.default_rng(0)
    columns = {name: random.integers(0, 9, 200) for name in ("user", "item")}
    table = pa.table({**columns, "x": random.normal(size=200), "y": columns["user"] % 2})
    small = {"embedding_dim": 8, "epochs": 1, "bottom_mlp_sizes": [8], "top_mlp_sizes": [4, 1]}
    model = dlrm.fit(table, SCHEMA, **small)
    expected = model.predict(table)
    model.save(tmp_path / "model")
    assert (dlrm.load(tmp_path / "model").predict(table) == expected).all()
    dims = [t["dim"] for t in read_config(tmp_path / "model")["tables"]]
    assert dims == [3, 8]
    message = "field user: embedding_dim 3: expected at most embedding_dim 2, the width of the"
    with pytest.raises(ValueError, match=message):
        dlrm.fit(table, SCHEMA, **{**small, "embedding_dim": 2, "bottom_mlp_sizes": [2]})


@pytest.mark.parametrize(
    ("user", "item", "message"),
    [
        ({"embedding_dim": 0}, {}, "field user: embedding_dim: expected 1 or more, got 0"),
        ({"embedding_dim": "8"}, {}, "embedding_dim"),
        (
            {"table": "t", "embedding_dim": 4},
            {"table": "t"},
            "field item: embedding_dim: expected 4, as of user, which shares table 't', got none; "
            "write embedding_dim: 4 at item, or change user",
        ),
    ],
)
def test_wrong_widths_in_a_schema_are_refused(user, item, message):
    fields = [{"column": "user", **user}, {"column": "item", **item}]
    with pytest.raises(ValueError, match=message):
        Schema.from_dict({"version": 1, "label": "y", "categorical": fields})


def test_a_specification_has_widths(tmp_path):
    sizes = {"user": 9, "item": 9}
    spec = FeatureSpec.named(
        tmp_path / "feature_spec.yaml", "y", ["x"], sizes, ["train", "test"], dims={"item": 4}
    )
    assert spec.field_dims == (None, 4)
    spec.feature_spec["item"]["embedding_dim"] = -4
    with pytest.raises(ValueError, match="feature item: embedding_dim: expected 1 or more, got -4"):
        dataclasses.replace(spec)
