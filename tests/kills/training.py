"""A small training run whose best changes and which prunes, and checks of it after a kill.

It saves steps 3, 6, 9 and 12, and each new best when tested: 2, 6 and 8. The functions run in
forks, see killing.py.
"""

import dlrm.environment  # noqa: F401  # first, as in the commands

# isort: split
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # torch's optimizers import it at their first step
import torch.distributed as dist
from killing import contents, difference
from tqdm import tqdm

import dlrm
from dlrm.data.clicks.batch import Batch, ClickDataset, Shard, Sharded
from dlrm.distributed import World
from dlrm.model.config import DLRMConfig
from dlrm.scripts.checkpoint import describe_run
from dlrm.tasks.recommendation import ClickLoader, Recommendation
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.directory import CheckpointDirectory, best_checkpoint, last_checkpoint
from dlrm.train.config import TrainConfig
from dlrm.train.log import RunLog, StoppedError
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.trainer import Trainer

torch.set_num_threads(1)
tqdm.get_lock()  # starts a process, which the shim forbids later

SCORES = {2: 0.60, 4: 0.55, 6: 0.65, 8: 0.70, 10: 0.50, 12: 0.60}  # by tested step
SAVED = (2, 3, 6, 8, 9, 12)
TABLE_SIZES = (7, 20, 3)
ARCHITECTURE = {"embedding_dim": 4, "bottom_mlp_sizes": [4], "top_mlp_sizes": [8, 1]}


class Clicks(ClickDataset):
    """Batches that are pure functions of their index."""

    def __init__(self, num_batches, seed):
        super().__init__(8 * num_batches, 8)
        self.table_sizes, self.num_numerical = list(TABLE_SIZES), 2
        self.categorical_names, self._seed = ["a", "b", "c"], seed

    def batch(self, index):
        random = torch.Generator().manual_seed(1000 * self._seed + index)
        ids = [torch.randint(size, (self.batch_size,), generator=random) for size in TABLE_SIZES]
        numerical = torch.randn(self.batch_size, 2, generator=random)
        return Batch(numerical, torch.stack(ids, 1), torch.arange(self.batch_size) % 2.0)


class Scored(Recommendation):
    """Evaluates as usual, except that the step determines the score."""

    trainer = None

    def evaluate(self, loader):
        step = self.trainer.progress.step
        rising = 1 - 1 / step if step % 4 == 0 else 0.1
        return super().evaluate(loader) | {"auc": SCORES.get(step, rising)}


def train(run, keep, in_background, rank=0, size=1, store=None):
    """Begins or resumes a run, as the command does, and completes it."""
    world = World(rank, size)
    if size > 1:
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=120)
        )
    config = TrainConfig(print_freq=5, test_freq=2, checkpoint_freq=3)
    trainer, batches = begin(run, config, keep, in_background, world)
    trainer.fit(*batches)
    trainer.checkpoints.release()
    if size > 1:
        dist.destroy_process_group()


def begin(run, config, keep, in_background=False, world=World(), after_step=lambda step: None):
    """Returns the trainer of a new or resumed run and its training and test batches."""
    sizes = {name: tuple(v) if isinstance(v, list) else v for name, v in ARCHITECTURE.items()}
    task = Scored(DLRMConfig(TABLE_SIZES, 2, **sizes), world, seed=1)
    shard = Shard(world, tuple(task.model.fields_by_rank[world.rank]))
    notes = Path(run).with_name("notes")
    checkpoints = CheckpointDirectory(run, keep, notes, world, in_background)
    checkpoints.claim()
    log = RunLog(quiet=True)
    task.trainer = Trainer(
        task,
        optimizers=task.optimizers(OptimizerConfig("adagrad", "adam")),
        schedule=lambda step: 0.01 * min(step, 12),
        config=config,
        world=world,
        log=log,
        checkpoints=checkpoints,
        run={"flags": ARCHITECTURE, "dataset": {"table sizes": list(TABLE_SIZES)}},
        after_step=after_step,
    )
    if last := checkpoints.last():
        task.trainer.resume(Checkpoint(last))
    batches = [ClickLoader(Sharded(data, shard)) for data in (Clicks(12, 1), Clicks(2, 2))]
    return task.trainer, batches


def train_until(run, end):
    """Trains, saving and pruning at every step, until the file `end` exists."""
    config = TrainConfig(epochs=100_000, test_freq=2, checkpoint_freq=1)

    def stop_at_end(step):
        trainer.stop_requested = Path(end).exists()

    trainer, batches = begin(run, config, keep=1, after_step=stop_at_end)
    try:
        trainer.fit(*batches)
    except StoppedError:
        return trainer.progress.step
    raise AssertionError("the run ended by itself")


def read_again_and_again(run, reads, end):
    """Loads the best model repeatedly while the run trains; returns the errors."""
    while last_checkpoint(run) is None:
        time.sleep(0.01)
    errors = []
    for _ in range(reads):
        try:
            dlrm.load(run)
        except Exception as error:
            errors.append(repr(error))
    Path(end).touch()
    return errors


def check_left(run, every_step):
    """Raises AssertionError unless readers find a run complete, as after some step.

    Args:
        run: directory after a kill.
        every_step: directory of the uninterrupted run, with every checkpoint it saved.
    """
    last = last_checkpoint(run)
    if last is None:
        assert best_checkpoint(run) is None
        for reader in (Checkpoint.open, describe_run, dlrm.load):
            try:
                raise AssertionError(f"{reader.__name__} found {reader(Path(run))}")
            except FileNotFoundError:
                pass
        return
    listed = describe_run(Path(run), check_crc=True)["checkpoints"]
    names = [entry["name"] for entry in listed]
    assert last.name == names[-1], (last, names)
    for name in names:
        expected = contents(Path(every_step, name))
        assert expected, f"{name} is no step that is saved"
        wrong = difference(contents(Path(run, name)), expected)
        assert not wrong, f"{name}: not that of the uninterrupted run: {wrong}"
    progress = Checkpoint(last).progress
    best = f"step-{int(progress['best']['step']):09d}" if progress["best"] else None
    found = best_checkpoint(run)
    assert (found and found.name) == best, f"{last.name} says best {best}, readers find {found}"
    assert [entry["name"] for entry in listed if entry["best"]] == ([best] if best else [])
    assert Checkpoint.open(run).path.name == (best or last.name)
    assert dlrm.load(run).path.name == (best or last.name)


def resume_and_check(run, every_step, whole, *arguments):
    """Resumes and compares the result with an uninterrupted run."""
    train(run, *arguments)
    check_end(run, every_step, whole)


def check_end(run, every_step, whole):
    """Raises AssertionError unless a run ended like the uninterrupted one, without leftovers."""
    wrong = difference(contents(run), whole)
    assert not wrong, f"resumed, it ends otherwise than an uninterrupted run: {wrong}"
    check_left(run, every_step)
