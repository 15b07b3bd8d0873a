"""Training with tables whose rows are split equals one process with whole tables."""

import json
import re

import numpy as np
import pytest
import torch
from click_runs import BATCH, DIM, SIZES, Run, batches_of, by, check, tables_of, train, trainer_of

from dlrm.distributed import World
from dlrm.model.config import DLRMConfig
from dlrm.model.dlrm import DLRM
from dlrm.train.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from dlrm.train.config import TrainConfig

pytestmark = pytest.mark.long
SPLIT = Run(balance="auto")  # the third table, on 2 ranks and on 4, some of which have no other


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "row_wise_adagrad", "adam"])
def test_losses_and_weights_are_those_of_one_process(ranks, size, optimizer):
    check(ranks, size, SPLIT._replace(optimizer=optimizer))


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(
    "changes",
    [
        {"embedding_dtype": "bf16"},
        {"hotness": 4},
        {"hotness": 4, "parts": (("pooling", "mean"),)},
        {"accumulate": 2},
        {"accumulate": 3, "hotness": 4},
        {"rows": BATCH * 3 + 1},  # a last batch of one sample
        {"max_grad_norm": 0.01},
        {"parts": (("hash_indices", True),)},
        {
            "optimizer": "adagrad",
            "hotness": 3,
            "parts": (("wide", True), ("embedding_init", "normal")),
        },
    ],
    ids=str,
)
def test_so_are_other_ways_to_train(ranks, size, changes):
    check(ranks, size, SPLIT._replace(**changes))


def test_bits_repeat_from_run_to_run(ranks):
    run = SPLIT._replace(optimizer="adam", accumulate=2)
    once, again = (by(ranks, 4, train, run)[0] for _ in range(2))
    assert once[0] == again[0]
    torch.testing.assert_close(once[1:3], again[1:3], atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_vectors_may_travel_in_half_precision(ranks, dtype):
    tolerance = 0.02 if dtype == torch.bfloat16 else 0.005  # a few roundings of values near 1
    check(ranks, 4, SPLIT._replace(dtype=dtype), tolerance)


def first_values(world, run):
    return tables_of(trainer_of(world, run))


@pytest.mark.parametrize("embedding_dtype", ["fp32", "bf16"])
def test_shards_start_with_the_values_of_the_whole_table(ranks, embedding_dtype):
    run = SPLIT._replace(embedding_dtype=embedding_dtype)
    expected = first_values(World(), run)
    for found in by(ranks, 4, first_values, run):
        torch.testing.assert_close(found, expected, atol=0, rtol=0)


def trained(world, run):
    trainer = trainer_of(world, run)
    trainer.config = TrainConfig(print_freq=1, max_steps=5)
    trainer.fit(*batches_of(trainer, run))
    return trainer


def saved(world, run, folder):
    trainer = trained(world, run)
    save_checkpoint(folder, trainer.parameters, {"flags": {}}, {"step": 5}, world=world)
    return tables_of(trainer)


def reloaded(world, run, folder, again):
    trainer = trainer_of(world, run)
    load_checkpoint(folder, trainer.parameters, resume=True, world=world)
    save_checkpoint(again, trainer.parameters, {"flags": {}}, {"step": 5}, world=world)
    return tables_of(trainer)


def table_files(folder):
    """Returns the files of tables and optimizer state, and the configuration of tables."""
    files = {path.name: path.read_bytes() for path in sorted((folder / "tables").iterdir())}
    return files, json.loads((folder / "config.json").read_text())["tables"]


@pytest.mark.parametrize(
    ("optimizer", "embedding_dtype"),
    [("adam", "fp32"), ("adagrad", "bf16"), ("row_wise_adagrad", "fp32")],
)
def test_checkpoints_move_between_placements(ranks, tmp_path, optimizer, embedding_dtype):
    run = SPLIT._replace(optimizer=optimizer, embedding_dtype=embedding_dtype)
    (tables, _) = by(ranks, 2, saved, run, tmp_path / "first")
    expected = table_files(tmp_path / "first")
    numbers = [np.frombuffer(expected[0][f"{i}.bin"], np.float32) for i in range(3)]
    for mine, table in zip(numbers, tables, strict=True):
        torch.testing.assert_close(torch.from_numpy(mine.copy()), table.flatten(), atol=0, rtol=0)
    for size, balance in ((2, "auto"), (4, "auto"), (2, "balanced")):
        again = tmp_path / f"{balance} {size}"
        other = run._replace(balance=balance)
        found, *_ = by(ranks, size, reloaded, other, tmp_path / "first", again)
        torch.testing.assert_close(found, tables, atol=0, rtol=0)
        assert table_files(again) == expected
    alone = reloaded(World(), run, tmp_path / "first", tmp_path / "alone")
    torch.testing.assert_close(alone, tables, atol=0, rtol=0)
    assert table_files(tmp_path / "alone") == expected


@pytest.mark.parametrize(("table", "value"), [(2, 200), (2, -1), (2, 2**40), (1, 7)])
@pytest.mark.parametrize("bags", [False, True])
def test_an_id_outside_its_table_is_refused_before_anything_is_sent(bags, table, value):
    said = []
    for rank in range(2):
        config = DLRMConfig(SIZES, 4, DIM, (DIM,), (1,), placement="auto")
        model = DLRM(config, World(rank, 2))
        own = model.fields_by_rank[rank]
        ids = torch.zeros(6, len(own), dtype=torch.int64)
        ids[5, [other == table for other in own]] = value
        lengths = torch.ones_like(ids) if bags else None
        with pytest.raises((RuntimeError, ValueError)) as raised:  # there is no process group
            model(torch.zeros(3, 4), ids.flatten() if bags else ids, lengths)
        said.append(str(raised.value))
    named = [text for text in said if "process group" not in text]
    assert named
    expected = rf"embedding(_bag)?: id {value} .* batch row 5: expected 0 <= id < {SIZES[table]}"
    assert all(re.search(expected, text) for text in named)
