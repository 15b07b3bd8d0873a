"""Checkpoints that some ranks save and others load."""

import functools
import json
import os
import re
import resource
import shutil
from pathlib import Path

import pytest
import torch

from dlrm.distributed import OtherRankError, World
from dlrm.model.config import DLRMConfig
from dlrm.tasks.recommendation import Recommendation
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.directory import CheckpointDirectory
from dlrm.train.checkpoints.nvidia import write_nvidia
from dlrm.train.checkpoints.state import Parameters
from dlrm.train.optim.base import set_learning_rate
from dlrm.train.optim.config import OptimizerConfig

pytestmark = pytest.mark.long
SIZES = (50, 7, 200)
KINDS = [("adagrad", "fp32"), ("adam", "fp32"), ("row_wise_adagrad", "bf16")]


def parameters(world, kind, placement="balanced", trained=True):
    """A model and optimizers after a few updates, which depend on tables, not placement."""
    optimizer, dtype = kind
    config = DLRMConfig(
        SIZES,
        4,
        8,
        bottom_mlp_sizes=(8,),
        top_mlp_sizes=(4, 1),
        embedding_dtype=dtype,
        placement=placement,
    )
    task = Recommendation(config, world, seed=3 if trained else 4)
    dense = optimizer.removeprefix("row_wise_")
    optimizers = task.optimizers(OptimizerConfig(optimizer, dense))
    set_learning_rate(optimizers, 0.1)
    for step in range(3 if trained else 0):
        for weight, tables in task.table_parameters():
            begin, rows, values = 0, [], []
            for table, shard in tables.items():
                random = torch.Generator().manual_seed(10 * table + step)
                own = torch.randint(shard.num_rows, (6,), generator=random)
                rows.append(begin + own)
                values.append(torch.randn(6, 8, generator=random))
                begin += shard.num_rows
            if rows:
                indices, values = torch.cat(rows)[None], torch.cat(values)
                weight.grad_dtype = None
                weight.grad = torch.sparse_coo_tensor(indices, values, weight.shape)
        random = torch.Generator().manual_seed(step)
        for weight in task.parameter_groups()["dense"]:
            weight.grad = torch.randn(weight.shape, generator=random)
        for one in optimizers:
            one.step()
    return Parameters(task.model, task.table_parameters(), optimizers)


def saved(world, kind, folder, background=False, placement="balanced"):
    torch.manual_seed(world.rank)
    run = CheckpointDirectory(folder, world=world, in_background=background)
    run.save(7, parameters(world, kind, placement), {"flags": {"a": 1}}, {"step": 7})
    run.finish()


def reloaded(world, kind, folder, again, placement):
    """Loads a checkpoint of any ranks and saves it again with these ranks."""
    run = CheckpointDirectory(folder, world=world)
    into = parameters(world, kind, placement, trained=False)
    progress = Checkpoint(run.last()).load(into, resume=True, world=world)
    CheckpointDirectory(again, world=world).save(7, into, {"flags": {"a": 1}}, progress)


@functools.cache
def everything(folder):
    checkpoint = Path(folder, "step-000000007")
    files = [p for p in checkpoint.rglob("*") if p.is_file()]
    skipped = ("rng", "manifest")
    return {
        str(p.relative_to(checkpoint)): p.read_bytes()
        for p in files
        if not p.name.startswith(skipped)
    }


def by(ranks, size, function, *arguments):
    if size == 1:
        return [function(World(), *arguments)]
    results = ranks(size).call(function, [arguments] * size)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_any_number_of_ranks_reads_what_any_other_has_saved(ranks, tmp_path, kind):
    by(ranks, 1, saved, kind, tmp_path / "by 1")
    expected = everything(tmp_path / "by 1")
    assert len([name for name in expected if name.startswith("tables/")]) >= 6
    for writers in (1, 2, 3, 4):
        background, placement = writers % 2 == 0, ("balanced", "nvidia")[writers // 3]
        folder = tmp_path / f"by {writers}"
        if writers > 1:
            by(ranks, writers, saved, kind, folder, background, placement)
            assert everything(folder) == expected
        for readers in (1, 2, 3, 4):
            again = tmp_path / f"from {writers} to {readers}"
            by(ranks, readers, reloaded, kind, folder, again, placement)
            assert everything(again) == expected


def loaded_from_nvidia(world, kind, theirs, again):
    into = parameters(world, kind, trained=False)
    Checkpoint(theirs).load(into, world=world)
    CheckpointDirectory(again, world=world).save(7, into, {"flags": {}}, {"step": 7})


@pytest.mark.parametrize("readers", [1, 3])
def test_any_number_of_ranks_reads_what_nvidia_has_saved(ranks, tmp_path, readers):
    by(ranks, 1, saved, KINDS[0], tmp_path / "ours")
    expected = everything(tmp_path / "ours")
    write_nvidia(Checkpoint(tmp_path / "ours" / "step-000000007"), tmp_path / "theirs")
    by(ranks, readers, loaded_from_nvidia, KINDS[0], tmp_path / "theirs", tmp_path / "again")
    found = everything(tmp_path / "again")
    for name in ("dense.safetensors", *(f"tables/{table}.bin" for table in range(len(SIZES)))):
        assert found[name] == expected[name], name


def test_each_rank_gets_its_own_random_state_back(ranks, tmp_path):
    by(ranks, 2, saved, KINDS[0], tmp_path)
    folder = tmp_path / "step-000000007"
    assert (folder / "rng.safetensors").read_bytes() != (folder / "rng.1.safetensors").read_bytes()
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    assert {"rng.safetensors", "rng.1.safetensors", "tables/2.sum.bin"} <= set(listed)


def saved_where_one_cannot_write(world, folder, background):
    run = CheckpointDirectory(folder, world=world, in_background=background)
    run.save(1, parameters(world, KINDS[0]), {"flags": {}}, {"step": 1})
    run.finish()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.rank == 1:  # it can write the first bytes of a file only
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        run.save(2, parameters(world, KINDS[0]), {"flags": {}}, {"step": 2})
        run.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


@pytest.mark.parametrize("background", [False, True])
def test_a_rank_that_cannot_write_leaves_the_earlier_checkpoint(ranks, tmp_path, background):
    first, second = ranks(2).call(saved_where_one_cannot_write, [(tmp_path, background)] * 2)
    assert isinstance(second, OSError)
    assert re.search(r"File too large: .*/tables/\d", str(second))
    assert isinstance(first, OtherRankError)
    assert sorted(os.listdir(tmp_path)) == ["step-000000001"]
    into = parameters(World(), KINDS[0], trained=False)
    assert Checkpoint(tmp_path / "step-000000001").load(into) == {"step": 1}


def finished_where_the_first_fails(world, folder, marks):
    """Saves; then the first rank cannot write `best.json`, or cannot read it to prune."""
    run = CheckpointDirectory(folder, world=world)
    run.save(1, parameters(world, KINDS[0]), {"flags": {}}, {"step": 1})
    if world.rank == 0 and marks:
        (folder / "best.json").mkdir()
    elif world.rank == 0:
        (folder / "best.json").write_text("{")
    if marks:
        run.mark_best({"step": 1, "score": 0.5})
    else:
        run.finish()


@pytest.mark.parametrize(("marks", "kind"), [(True, OSError), (False, ValueError)])
def test_all_ranks_end_where_the_first_cannot_note_the_best_or_prune(ranks, tmp_path, marks, kind):
    calls = [(tmp_path, marks)] * 2
    first, second = ranks(2).call(finished_where_the_first_fails, calls)
    assert isinstance(first, kind)
    assert str(tmp_path / "best.json") in str(first)
    assert isinstance(second, OtherRankError)


def opened_elsewhere(world, folder):
    CheckpointDirectory(folder / str(world.rank), world=world)


def test_a_rank_that_sees_another_directory_is_refused(ranks, tmp_path):
    first, second = ranks(2).call(opened_elsewhere, [(tmp_path,)] * 2)
    assert isinstance(first, OtherRankError)
    assert str(second).startswith(f"rank 1: {tmp_path}/1: expected the folder of rank 0")
    assert not [*tmp_path.glob("*/.*")]


def opened(world, folder, sizes):
    config = DLRMConfig(sizes, 4, 8, bottom_mlp_sizes=(8,), top_mlp_sizes=(4, 1))
    task = Recommendation(config, world)
    Checkpoint(folder).load(Parameters(task.model, task.table_parameters()), world=world)


def test_a_checkpoint_of_other_tables_is_refused_by_all(ranks, tmp_path):
    by(ranks, 1, saved, KINDS[0], tmp_path)
    folder = tmp_path / "step-000000007"
    for sizes in ((50, 7, 201), (50, 7), (50, 7, 200, 1)):
        results = ranks(2).call(opened, [(folder, sizes)] * 2)
        assert all(isinstance(result, ValueError | OtherRankError) for result in results)
        told = next(result for result in results if isinstance(result, ValueError))
        assert "of another architecture" in str(told)


def test_a_damaged_table_is_named_by_who_reads_it(ranks, tmp_path):
    by(ranks, 2, saved, KINDS[0], tmp_path)
    folder = tmp_path / "step-000000007"
    copy = shutil.copytree(folder, tmp_path / "copy")
    with open(copy / "tables/2.bin", "r+b") as file:
        file.write(b"xx")
    results = ranks(2).call(opened, [(copy, SIZES)] * 2)
    told = next(result for result in results if isinstance(result, ValueError))
    assert "tables/2.bin: expected CRC-32" in str(told)
    assert any(isinstance(result, OtherRankError) for result in results)
