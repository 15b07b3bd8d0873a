"""Training with many processes equals training with one, wherever tables and their rows are."""

import json
import re

import numpy as np
import pytest
import torch
from click_runs import (
    BATCH,
    DIM,
    SIZES,
    STEPS,
    Run,
    batches_of,
    by,
    check,
    tables_of,
    train,
    trainer_of,
)

from dlrm.distributed import OtherRankError, World
from dlrm.model.config import DLRMConfig
from dlrm.model.dlrm import DLRM
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.config import TrainConfig
from dlrm.train.log import StoppedError

pytestmark = pytest.mark.long
SPLIT = Run(balance="auto")  # the third table, on 2 ranks and on 4, some of which have no other
SHORT = BATCH * 3 + 1  # a last batch of one sample


def parts(**fields):
    return tuple(fields.items())


WIDE, BINS = parts(wide=True), parts(numerical_embedding="piecewise", numerical_bins=4)
RUNS = [  # every optimizer with every placement; every other setting with some of both
    (2, Run(hotness=4)),
    (3, Run(balance="nvidia", embedding_dtype="bf16")),
    (2, SPLIT),
    (4, SPLIT._replace(accumulate=3, hotness=4)),
    (4, SPLIT._replace(hotness=4, parts=parts(pooling="mean"))),
    (4, SPLIT._replace(rows=SHORT)),
    (2, SPLIT._replace(max_grad_norm=0.01)),
    (4, SPLIT._replace(parts=parts(hash_indices=True))),
    (4, Run("adagrad", l2=0.1, embedding_dtype="bf16")),
    (2, Run("adagrad", "nvidia")),
    (2, Run("adagrad", "auto", hotness=3, parts=parts(wide=True, embedding_init="normal"))),
    (3, Run("row_wise_adagrad", accumulate=2)),
    (4, Run("row_wise_adagrad", "nvidia")),
    (4, Run("row_wise_adagrad", "auto", embedding_dtype="bf16")),
    (4, Run("adam", rows=SHORT)),
    (3, Run("adam", "nvidia", accumulate=2, parts=WIDE)),
    (4, Run("adam", "auto", accumulate=2)),
    (2, Run("adam", l2=0.1, hotness=4)),
    (2, Run(accumulate=3, hotness=4, parts=parts(interaction_op="cat"))),
    (4, Run(accumulate=100)),
    (2, Run(l2=0.1, accumulate=2, parts=WIDE)),
    (4, Run(embedding_dtype="bf16", parts=BINS + WIDE)),
    (2, Run(parts=parts(interaction_op="cuda_dot,dcn", cross_rank=3, wide=True))),
    (4, Run(accumulate=2, parts=parts(interaction_op="dcn", cross_structure="parallel"))),
    (2, Run(accumulate=2, parts=parts(interaction_op="quadratic", quadratic_layers=1))),
    (4, Run("adam", accumulate=2, parts=parts(ensemble=3, wide=True))),
    (2, Run("adam", parts=parts(ensemble="dot,quadratic", wide=True))),
]


@pytest.mark.parametrize(("size", "run"), RUNS, ids=str)
def test_losses_and_weights_are_those_of_one_process(ranks, size, run):
    check(ranks, size, run)


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
    Checkpoint.save(folder, trainer.parameters, {"flags": {}}, {"step": 5}, world=world)
    return tables_of(trainer)


def reloaded(world, run, folder, again):
    trainer = trainer_of(world, run)
    Checkpoint(folder).load(trainer.parameters, resume=True, world=world)
    Checkpoint.save(again, trainer.parameters, {"flags": {}}, {"step": 5}, world=world)
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


def test_half_precision_works_where_a_rank_has_no_table(ranks):
    results = ranks(4).call(train, [(Run(dtype=torch.float16),)] * 4)
    assert [len(result[0]) for result in results] == [STEPS - 1] * 4


@pytest.mark.parametrize("infinite_on", [0, 1])
def test_an_overflow_of_one_rank_skips_the_step_on_all(ranks, infinite_on):
    run = Run(dtype=torch.float16, infinite_on=infinite_on)
    first, second = ranks(2).call(train, [(run,)] * 2)
    assert first[4] == second[4] == "  skipped: 1"
    torch.testing.assert_close(first[1:3], second[1:3], atol=0, rtol=0)
    assert all(table.isfinite().all() for table in first[1])


def test_ranks_leave_together_at_a_threshold_and_after_the_last_step(ranks):
    for run, steps in ((Run(auc_threshold=0.01), 3), (Run(max_steps=7), 7)):
        for result in ranks(3).call(train, [(run,)] * 3):
            assert len(result[0]) == steps - 1  # the first has no line


@pytest.mark.parametrize(("stop_on", "print_freq", "stopped"), [(0, 1, 5), (2, 3, 7)])
def test_ranks_leave_together_after_the_next_line_when_one_is_asked_to_stop(
    ranks, stop_on, print_freq, stopped
):
    results = ranks(3).call(train, [(Run(stop_on=stop_on, print_freq=print_freq),)] * 3)
    assert {type(result) for result in results} == {StoppedError}
    (said,) = {str(result) for result in results}
    assert said.startswith(f"stopped after step {stopped}; nothing is saved")


@pytest.mark.parametrize("infinite_on", [0, 1])
def test_a_nan_of_one_rank_ends_all_and_is_said_once(ranks, infinite_on):
    first, second = ranks(2).call(train, [(Run(infinite_on=infinite_on),)] * 2)
    assert isinstance(first, FloatingPointError)
    assert isinstance(second, OtherRankError)
