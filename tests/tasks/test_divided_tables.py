"""Training with divided and copied tables equals one process with whole tables."""

import json
import re
from pathlib import Path

import list_testing
import numpy as np
import pytest
import torch
from click_runs import BATCH, DIM, SIZES, Run, batches_of, by, check, tables_of, train, trainer_of

from dlrm.data.clicks.batch import Shard
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.readers import SplitDataset
from dlrm.data.clicks.synthetic import write_synthetic_dataset
from dlrm.distributed import World, gather
from dlrm.distributed.placement import Piece, Placement
from dlrm.manifest import read_manifest
from dlrm.model.config import DLRMConfig
from dlrm.model.dlrm import DLRM
from dlrm.tasks.recommendation import Recommendation
from dlrm.train.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from dlrm.train.checkpoints.directory import CheckpointDirectory
from dlrm.train.config import TrainConfig
from dlrm.train.optim.base import set_learning_rate
from dlrm.train.optim.config import OptimizerConfig

pytestmark = pytest.mark.long


def piece(table, rank, rows=None, columns=None):
    shape = (SIZES[table], DIM)
    return Piece(table, rows or (0, shape[0]), columns or (0, DIM), rank, shape)


def placed(num_ranks, *pieces):
    return Placement(SIZES, DIM, num_ranks, pieces)


def by_rows(table, *edges):
    ends = [*edges[1:], SIZES[table]]
    return [piece(table, rank, rows) for rank, rows in enumerate(zip(edges, ends, strict=True))]


def by_columns(table, *edges):
    ends = [*edges[1:], DIM]
    return [
        piece(table, rank, None, columns)
        for rank, columns in enumerate(zip(edges, ends, strict=True))
    ]


TWO = {
    "rows": placed(2, piece(0, 1), piece(1, 0), *by_rows(2, 0, 60)),
    "columns": placed(2, *by_columns(0, 0, 4), piece(1, 1), *by_columns(2, 0, 4)),
    "uneven columns": placed(2, *by_columns(0, 0, 2), piece(1, 0), piece(2, 1)),
    "copies": placed(2, piece(0, None), piece(1, None), piece(2, 1)),
    "copies alone": placed(2, *(piece(table, None) for table in range(3))),
    "hot rows": placed(
        2, piece(0, 0), piece(1, 1), piece(2, None, (0, 20)), piece(2, 0, (20, 90)),
        piece(2, 1, (90, 200)),
    ),
    "mixed": placed(
        2, *by_columns(0, 0, 4), piece(1, None), piece(2, None, (0, 11)), piece(2, 1, (11, 200)),
    ),
}  # fmt: skip
FOUR = {
    "rows": placed(4, *by_rows(0, 0, 10, 20, 30), piece(1, 3), *by_rows(2, 0, 60, 61)),
    "columns": placed(4, *by_columns(0, 0, 2, 4, 6), piece(1, 2), *by_columns(2, 0, 4)),
    "mixed": placed(
        4, piece(0, None), piece(1, 1), piece(2, None, (0, 9)), piece(2, 0, (9, 100), (0, 4)),
        piece(2, 1, (9, 200), (4, 8)), piece(2, 2, (100, 200), (0, 4)),
    ),
}  # fmt: skip


def with_optimizers():
    """Yields placements with the optimizers they allow; sgd and adagrad keep a part of adam's."""
    for placement in (*TWO.values(), *FOUR.values()):
        is_mixed = placement in (TWO["mixed"], FOUR["mixed"])
        for optimizer in ("sgd", "adagrad", "adam"):
            marks = () if is_mixed or optimizer == "adam" else pytest.mark.slow
            yield pytest.param(placement, optimizer, marks=marks)
        if all(piece.has_all_columns for piece in placement.pieces):
            yield placement, "row_wise_adagrad"


@pytest.mark.parametrize(("placement", "optimizer"), with_optimizers())
def test_losses_and_weights_are_those_of_one_process(ranks, placement, optimizer):
    check(ranks, placement.num_ranks, Run(optimizer=optimizer), placement)


SOME = [
    pytest.param(TWO["hot rows"], id="two, hot rows"),
    pytest.param(TWO["mixed"], id="two", marks=pytest.mark.slow),
    pytest.param(FOUR["columns"], id="four, columns", marks=pytest.mark.slow),
    pytest.param(FOUR["mixed"], id="four"),  # columns, copies and hot rows
]


@pytest.mark.parametrize("placement", SOME)
@pytest.mark.parametrize(
    "run",
    [
        Run(embedding_dtype="bf16"),
        Run(hotness=4),
        Run(hotness=4, parts=(("pooling", "mean"),)),
        Run(accumulate=2),
        Run(accumulate=3, hotness=4),
        Run(rows=BATCH * 3 + 1),  # a last batch of one sample
        Run(max_grad_norm=0.01),
        Run(parts=(("hash_indices", True),)),
        Run(optimizer="adagrad", hotness=3, parts=(("wide", True), ("embedding_init", "normal"))),
    ],
    ids=str,
)
def test_so_are_other_ways_to_train(ranks, placement, run):
    check(ranks, placement.num_ranks, run, placement)


def test_bits_repeat_from_run_to_run(ranks):
    run = Run(optimizer="adam", accumulate=2)
    once, again = (by(ranks, 4, train, run, FOUR["mixed"])[0] for _ in range(2))
    assert once[0] == again[0]
    torch.testing.assert_close(once[1:3], again[1:3], atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_vectors_may_travel_in_half_precision(ranks, dtype):
    run = Run(dtype=dtype)
    tolerance = 0.02 if dtype == torch.bfloat16 else 0.005  # a few roundings of values near 1
    check(ranks, 4, run, FOUR["mixed"], tolerance)


def first_values(world, placement, embedding_dtype):
    return tables_of(trainer_of(world, Run(embedding_dtype=embedding_dtype), placement))


@pytest.mark.parametrize("embedding_dtype", ["fp32", "bf16"])
def test_pieces_start_with_the_values_of_the_whole_table(ranks, embedding_dtype):
    expected = first_values(World(), None, embedding_dtype)
    for placement in (TWO["mixed"], TWO["hot rows"]):
        for found in by(ranks, 2, first_values, placement, embedding_dtype):
            torch.testing.assert_close(found, expected, atol=0, rtol=0)


def saved(world, run, placement, folder):
    trainer = trainer_of(world, run, placement)
    trainer.config = TrainConfig(print_freq=1, max_steps=5)
    trainer.fit(*batches_of(trainer, run))
    save_checkpoint(folder, trainer.parameters, {"flags": {}}, {"step": 5}, world=world)
    return tables_of(trainer)


def reloaded(world, run, placement, folder, again):
    trainer = trainer_of(world, run, placement)
    load_checkpoint(folder, trainer.parameters, resume=True, world=world)
    save_checkpoint(again, trainer.parameters, {"flags": {}}, {"step": 5}, world=world)
    return tables_of(trainer)


def table_files(folder):
    """Returns the files of tables and optimizer state, and the configuration of tables."""
    files = {path.name: path.read_bytes() for path in sorted((folder / "tables").iterdir())}
    return files, json.loads((folder / "config.json").read_text())["tables"]


def saved_by_nodes(world, run, placement, folder):
    """Saves where each rank has a folder of its own."""
    directory = CheckpointDirectory(Path(f"{folder} of node {world.rank}"), world=world)
    trainer = trainer_of(world, run, placement)
    trainer.config = TrainConfig(print_freq=1, max_steps=5)
    trainer.fit(*batches_of(trainer, run))
    directory.save(5, trainer.parameters, {"flags": {}}, {"step": 5})
    directory.close()


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [("adam", "mixed"), ("adam", "columns"), ("row_wise_adagrad", "rows")],
)
def test_pieces_of_other_nodes_are_put_in_their_places(ranks, tmp_path, optimizer, name):
    run = Run(optimizer=optimizer)
    by(ranks, 2, saved, run, TWO[name], tmp_path / "common")
    by(ranks, 2, saved_by_nodes, run, TWO[name], tmp_path / "run")
    gathered = tmp_path / "run of node 0" / "step-000000005"
    assert table_files(gathered) == table_files(tmp_path / "common")
    read_manifest(gathered, "checkpoint", check_crc=True)


@pytest.mark.parametrize(
    ("optimizer", "embedding_dtype", "names"),
    [
        ("adam", "fp32", ["mixed", "rows", "columns"]),
        ("adagrad", "bf16", ["mixed", "columns"]),
        ("row_wise_adagrad", "fp32", ["rows", "hot rows", "copies"]),
    ],
)
def test_checkpoints_move_between_placements(ranks, tmp_path, optimizer, embedding_dtype, names):
    run = Run(optimizer=optimizer, embedding_dtype=embedding_dtype)
    for name in names:
        folder = tmp_path / name
        (tables, _) = by(ranks, 2, saved, run, TWO[name], folder)
        expected = table_files(folder)
        numbers = [np.frombuffer(expected[0][f"{i}.bin"], np.float32) for i in range(3)]
        for mine, table in zip(numbers, tables, strict=True):
            torch.testing.assert_close(
                torch.from_numpy(mine.copy()), table.flatten(), atol=0, rtol=0
            )
        for other in names:
            again = tmp_path / f"{name} to {other}"
            found, _ = by(ranks, 2, reloaded, run, TWO[other], folder, again)
            torch.testing.assert_close(found, tables, atol=0, rtol=0)
            assert table_files(again) == expected
        alone = tmp_path / f"{name} alone"
        torch.testing.assert_close(
            reloaded(World(), run, None, folder, alone), tables, atol=0, rtol=0
        )
        assert table_files(alone) == expected


@pytest.mark.parametrize(("table", "value"), [(2, 200), (2, -1), (2, 2**40), (1, 7)])
@pytest.mark.parametrize("name", ["rows", "hot rows", "mixed"])
def test_an_id_outside_its_table_is_refused_before_anything_is_sent(name, table, value):
    said = []
    for rank in range(2):
        model = DLRM(DLRMConfig(SIZES, 4, DIM, (DIM,), (1,)), World(rank, 2), placement=TWO[name])
        own = model.fields_by_rank[rank]
        ids = torch.zeros(6, len(own), dtype=torch.int64)
        ids[5, [other == table for other in own]] = value
        with pytest.raises((RuntimeError, ValueError)) as raised:  # there is no process group
            model(torch.zeros(3, 4), ids)
        said.append(str(raised.value))
    named = [text for text in said if "process group" not in text]
    assert named
    assert all(re.search(r"embedding(_bag|_pieces)?: id .* batch row", text) for text in named)


def test_row_wise_adagrad_needs_whole_rows(ranks):
    for result in ranks(2).call(train, [(Run(optimizer="row_wise_adagrad"), TWO["columns"])] * 2):
        assert isinstance(result, ValueError)
        assert "table 0: expected pieces with all columns" in str(result)


def listed(num_ranks):
    """Places the tables of `list_testing`: in columns, as a copy, and by hot rows."""
    rows, dim = tuple(list_testing.SIZES.values()), DIM
    whole = [
        Piece(table, (0, count), (0, dim), None, (count, dim)) for table, count in enumerate(rows)
    ]
    half = rows[2] // 2
    pieces = [whole[1], whole[0]._replace(columns=(0, 4), rank=0)]
    pieces += [whole[0]._replace(columns=(4, 8), rank=1), whole[2]._replace(rows=(0, 9))]
    pieces += [
        whole[2]._replace(rows=(9, half), rank=1),
        whole[2]._replace(rows=(half, rows[2]), rank=0),
    ]
    return Placement(rows, dim, num_ranks, tuple(pieces))


def stepped(world, folder, placement):
    """Takes three steps on data from disk; returns the losses of all ranks and batch 1."""
    spec = FeatureSpec.load(folder)
    poolings = spec.poolings
    config = DLRMConfig(tuple(spec.cardinalities), 2, DIM, (DIM,), (4, 1), table_poolings=poolings)
    task = Recommendation(config, world, seed=2, placement=placement)
    model = task.model
    shard = Shard(world, tuple(model.fields_by_rank[world.rank]), model.own_samples_only)
    data, losses = SplitDataset(spec, "train", 11, shard=shard), []
    (*optimizers,) = task.optimizers(OptimizerConfig(freeze_mlps=True))
    set_learning_rate(optimizers, 0.5)
    for index in range(3):
        loss = task.loss(data.batch(index))
        losses.append(sum(gather(loss.item(), world)))
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return losses, data.batch(1)


def test_lists_with_weights_are_read_and_trained_in_pieces(ranks, tmp_path):
    folder = tmp_path / "data"
    rows = list_testing.drawn(33, seed=0)
    list_testing.write(folder, {"train": rows, "test": rows}, weights=True)
    expected, whole = stepped(World(), folder, None)
    assert expected[2] != pytest.approx(expected[1], abs=1e-3)  # steps have an effect
    placement = listed(2)
    first, second = by(ranks, 2, stepped, folder, placement)
    for losses, _ in (first, second):
        assert losses == pytest.approx(expected, abs=1e-5)
    for rank, (_, batch) in enumerate((first, second)):
        own = World(rank, 2).part(11)
        others = [row for row in range(11) if not own.start <= row < own.stop]
        assert placement.replicated_alone(rank) == (1,)
        assert batch.lengths[others, 1].sum() == 0
        torch.testing.assert_close(batch.lengths[own], whole.lengths[own], check_dtype=False)
        torch.testing.assert_close(
            batch.lengths[:, [0, 2]], whole.lengths[:, [0, 2]], check_dtype=False
        )


def ids_from_disk(world, folder, placement):
    shard = Shard(
        world, tuple(placement.tables_by_rank()[world.rank]), placement.replicated_alone(world.rank)
    )
    spec = FeatureSpec.load(folder)
    read = SplitDataset(spec, "train", BATCH, shard=shard).batch(0).categorical
    taken = shard.take(SplitDataset(spec, "train", BATCH).batch(0)).categorical
    return read, taken, SplitDataset(spec, "train", BATCH).batch(0).categorical


@pytest.mark.parametrize("rank", [0, 1])
def test_ids_of_copies_are_read_for_own_samples_alone(tmp_path, rank):
    spec = FeatureSpec.default(tmp_path / "data", 4, SIZES)
    write_synthetic_dataset(tmp_path / "data", spec, 40, seed=1)
    read, taken, whole = ids_from_disk(World(rank, 2), tmp_path / "data", TWO["copies"])
    own = World(rank, 2).part(BATCH)
    tables = TWO["copies"].tables_by_rank()[rank]
    expected = torch.zeros_like(whole)
    expected[own] = whole[own]
    expected[:, 2] = whole[:, 2]  # only rank 1 looks up and reads it
    torch.testing.assert_close(read, expected[:, tables], check_dtype=False)
    torch.testing.assert_close(taken, expected[:, tables], check_dtype=False)
