"""Training with tables in files gives the bits of training with tables in memory."""

import errno
import os
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from click_runs import Sharded

from dlrm.data.clicks.batch import Shard
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.synthetic import SyntheticDataset
from dlrm.distributed import OtherRankError, World
from dlrm.model.config import DLRMConfig
from dlrm.model.tables.files import mapped_zeros
from dlrm.scripts.common.dlrm_flags import parse
from dlrm.tasks.recommendation import ClickLoader, Recommendation
from dlrm.tasks.settle import settle
from dlrm.tasks.splits import SplitBatches
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.directory import CheckpointDirectory, last_checkpoint
from dlrm.train.config import TrainConfig
from dlrm.train.log import RunLog, StoppedError
from dlrm.train.optim.base import set_learning_rate
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.trainer import Trainer

SIZES, BATCH, STEPS = (400, 7, 900), 8, 30


@pytest.fixture
def tmp_path(tmp_path):
    """Uses memory if possible, since every checkpoint waits for the disk."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


class Run:
    """A run of a small model, with tables in memory or in files."""

    def __init__(self, folder, mapped, hotness=None, l2=0.0, **changes):
        optimizer = OptimizerConfig(
            changes.pop("optimizer", "adagrad"), "sgd", embedding_l2=l2, embedding_l2_mode="all"
        )
        self.config = {"test_freq": 7, "checkpoint_freq": 5}
        if "gradient_accumulation_steps" in changes:
            self.config["gradient_accumulation_steps"] = changes.pop("gradient_accumulation_steps")
        architecture = DLRMConfig(
            SIZES, 4, 8, bottom_mlp_sizes=(8,), top_mlp_sizes=(8, 1), **changes
        )
        files = str(folder / "files") if mapped else None
        self.task = Recommendation(architecture, seed=5, files=files)
        self.checkpoints = CheckpointDirectory(folder / "run", 2)
        self.stop_at = None
        self.trainer = Trainer(
            self.task,
            optimizers=self.task.optimizers(optimizer),
            schedule=lambda step: 0.1 / step**0.5,
            config=TrainConfig(**self.config),
            log=RunLog(quiet=True),
            checkpoints=self.checkpoints,
            run={"flags": {}, "dataset": {"table sizes": list(SIZES)}},
            after_step=self._stop,
        )
        spec = FeatureSpec.default(".", 4, list(SIZES))
        train, test = (
            SyntheticDataset(spec, split, rows, BATCH, seed=1, hotness=hotness and [hotness])
            for split, rows in (("train", BATCH * STEPS), ("test", 40))
        )
        self.batches = SplitBatches(ClickLoader(train), ClickLoader(test), None)

    def _stop(self, step):
        self.trainer.stop_requested = step == self.stop_at

    def fit(self, stop_at=None):
        self.stop_at = stop_at
        try:
            return self.trainer.fit(*self.batches)
        except StoppedError:
            return None
        finally:
            self.checkpoints.release()


def assert_same(folder, other):
    """Compares the last checkpoints of two runs, bit for bit."""
    one, two = (Checkpoint(last_checkpoint(path / "run")) for path in (folder, other))
    assert one.progress["history"] == two.progress["history"]
    assert one.dense.keys() == two.dense.keys()
    for name, tensor in one.dense.items():
        assert tensor.equal(two.dense[name]), name
    for a, b in zip(one.tables, two.tables, strict=True):
        assert (a.part(0, a.rows) == b.part(0, b.rows)).all()
    for a, b in zip(one.table_state, two.table_state, strict=True):
        assert a.keys() == b.keys()
        for name, rows in a.items():
            assert (rows.part(0, rows.rows) == b[name].part(0, rows.rows)).all()
    assert [t.get("scalars") for t in one.config["tables"]] == [
        t.get("scalars") for t in two.config["tables"]
    ]


CASES = {
    "sgd": {"optimizer": "sgd"},
    "adagrad": {},
    "row-wise": {"optimizer": "row_wise_adagrad", "hash_indices": True, "max_table_size": 250},
    "adam": {"optimizer": "adam", "embedding_init": "normal"},
    "bf16": {"optimizer": "adam", "embedding_dtype": "bf16"},
    "l2": {"l2": 0.05, "optimizer": "adam"},
    "lists": {"hotness": 3, "pooling": "mean", "wide": True},
    "parts": {"gradient_accumulation_steps": 3, "hotness": 3, "embedding_dtype": "bf16"},
}


@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_memory_also_after_resuming(case, tmp_path):
    changes = CASES[case]
    Run(tmp_path / "memory", False, **changes).fit()
    Run(tmp_path / "files", True, **changes).fit(stop_at=13)
    for stop in (22, None):
        run = Run(tmp_path / "files", True, **changes)
        run.trainer.resume(Checkpoint(last_checkpoint(tmp_path / "files" / "run")))
        run.fit(stop_at=stop)
    assert_same(tmp_path / "memory", tmp_path / "files")


def test_weights_and_state_are_in_files_without_names(tmp_path):
    folder = tmp_path / "files"
    run = Run(tmp_path, True, wide=True, optimizer="adagrad")
    maps = [
        line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line
    ]
    assert all(" rw-s " in line for line in maps)  # shared, so that the kernel writes them
    sizes = [
        int(end, 16) - int(begin, 16) for begin, end in (m.split()[0].split("-") for m in maps)
    ]
    assert sum(sizes) >= 4 * (8 + 1) * 2 * sum(SIZES)  # weights, wide weights, and their state
    assert list(folder.iterdir()) == []
    run.fit()
    assert list(folder.iterdir()) == []


def full(file, begin, size, number=errno.ENOSPC):
    raise OSError(number, os.strerror(number))


def test_too_little_room_is_named_before_a_table_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        OSError, match=r"files: a table or its .* needs 41,824 bytes, and [\d,]+ are"
    ):
        Run(tmp_path, True)
    monkeypatch.setattr(os, "posix_fallocate", partial(full, number=errno.EIO))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        Run(tmp_path, True)


def test_a_table_without_rows_has_no_file(tmp_path):
    assert mapped_zeros(str(tmp_path / "files"), (0, 8), torch.float32).shape == (0, 8)
    assert not (tmp_path / "files").exists()


def losses_of(world, folder, mapped):
    """Trains for some steps, with a table whose rows are divided; returns this rank's losses."""
    mlps = {"bottom_mlp_sizes": (8,), "top_mlp_sizes": (8, 1), "placement": "auto"}
    config, chosen = DLRMConfig(SIZES, 4, 8, **mlps, wide=True), OptimizerConfig("adagrad", "sgd")
    files = str(folder / "files") if mapped else None
    task = Recommendation(config, world, seed=5, files=files)
    assert not task.model.placement.is_whole
    optimizers = task.optimizers(chosen)
    set_learning_rate(optimizers, 0.1)
    shard = Shard(world, tuple(task.model.fields_by_rank[world.rank]))
    data = SyntheticDataset(FeatureSpec.default(".", 4, list(SIZES)), "train", 60, 9, seed=1)
    losses = []
    for index in range(5):
        losses.append(task.loss(Sharded(data, shard).batch(index)))
        losses[-1].backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [loss.item() for loss in losses]


def test_ranks_have_files_of_their_own(ranks, tmp_path):
    memory, mapped = (
        ranks(2).call(losses_of, [(tmp_path, mapped)] * 2) for mapped in (False, True)
    )
    assert memory == mapped
    assert memory[0][0] != memory[0][4]


def arguments_of(world, folder):
    """Opens a run whose last rank has room for the tables, and none for the optimizer's state."""
    flags = ["--dataset_type=synthetic_random", "--synthetic_dataset_table_sizes=400,70,900"]
    flags += ["--synthetic_dataset_num_entries=64", "--batch_size=8", "--embedding_dim=8"]
    flags += ["--bottom_mlp_sizes=8", "--top_mlp_sizes=8,1", "--embedding_optimizer=adagrad"]
    flags += ["--base_device=cpu", f"--table_files={folder}"]
    work = settle(parse(flags), world).assemble(world)
    with pytest.MonkeyPatch.context() as patch:
        if world.rank:
            patch.setattr(os, "posix_fallocate", full)
        work.trainer_arguments(work.loaders().train)


def test_all_ranks_end_where_one_has_no_room_for_the_state(ranks, tmp_path):
    first, last = ranks(2).call(arguments_of, [(tmp_path / "files",)] * 2)
    assert isinstance(first, OtherRankError)
    assert isinstance(last, OSError)
    assert "a table or its optimizer's state needs" in str(last)


def test_tables_beyond_the_disk_are_refused_before_any_is_made(tmp_path):
    flags = ["--dataset_type=synthetic_random", "--synthetic_dataset_table_sizes=1000000000,9"]
    flags += ["--synthetic_dataset_num_entries=64", "--batch_size=8", "--embedding_dim=1024"]
    flags += ["--bottom_mlp_sizes=1024", "--top_mlp_sizes=8,1", "--base_device=cpu"]
    with pytest.raises(ValueError, match="--table_files .*: needs .* GB on the disk, .* free$"):
        settle(parse([*flags, f"--table_files={tmp_path / 'files'}"]), World()).assemble(World())
    assert not (tmp_path / "files").exists()
