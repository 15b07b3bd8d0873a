"""Checkpoints that get further rows while they are loaded train like models built that way."""

import numpy as np
import pytest
import torch
from compared_checkpoints import weights_of
from ranks import Ranks

from dlrm.data.clicks.batch import Batch
from dlrm.model.config import DLRMConfig
from dlrm.tasks.recommendation import Recommendation
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.tables import SavedRows
from dlrm.train.config import TrainConfig
from dlrm.train.optim.config import OptimizerConfig
from dlrm.train.trainer import Trainer

SMALL, LARGE, DIM = (10, 6, 50), (14, 6, 300), 8
# Normal draws do not depend on the number of rows if it is even.
INIT = {"embedding_init": "normal", "embedding_init_std": 0.1}
SHAPE = {"embedding_dim": DIM, "bottom_mlp_sizes": (DIM,), "top_mlp_sizes": (4, 1)}
KINDS = {
    "sgd": ("sgd", {}),
    "adagrad, bf16": ("adagrad", {"embedding_dtype": "bf16"}),
    "row_wise_adagrad, wide": ("row_wise_adagrad", {"wide": True}),
    "adam": ("adam", {}),
    "adam, wide, bf16": ("adam", {"wide": True, "embedding_dtype": "bf16"}),
}


class Steps:
    """Batches of ids below the given sizes; batch i is a pure function of i."""

    num_samples = 64

    def __init__(self, sizes, first=0):
        self.sizes, self.first = sizes, first

    def __len__(self):
        return 4

    def batches(self, epoch=0, start=0):
        for index in range(self.first + start, self.first + len(self)):
            random = np.random.default_rng(index)
            ids = np.stack([random.integers(0, size, 16) for size in self.sizes], axis=1)
            labels = torch.from_numpy(random.integers(0, 2, 16)).float()
            yield Batch(torch.ones(16, 2) * index, torch.from_numpy(ids), labels)


def trainer_of(sizes, kind="adam", seed=3, world=None, **own):
    config = DLRMConfig(sizes, 2, **SHAPE | INIT | own)
    flags = {**vars(config), "seed": seed}
    arguments = {} if world is None else {"world": world}
    task = Recommendation(config, seed=seed, **arguments)
    trainer = Trainer(
        task,
        optimizers=task.optimizers(OptimizerConfig(kind, "sgd")),
        schedule=lambda step: 0.1,
        config=TrainConfig(test_after=9),
        run={"flags": flags, "dataset": {"table sizes": [*sizes]}},
        **arguments,
    )
    trainer.log.quiet = True
    return trainer


def trained(trainer, steps):
    trainer.progress.step = 0
    trainer.fit(steps, steps)
    return trainer


def saved(trainer, path):
    Checkpoint.save(path, trainer.parameters, trainer.run, {"step": 4}, world=trainer.world)
    return Checkpoint(path)


def load_grown(path, trainer, sizes):
    parameters, world = trainer.parameters, trainer.world
    return Checkpoint(path).load(parameters, world, optimizers=True, table_sizes=sizes)


def everything(trainer, path):
    """Saves a trainer; returns all weights and state."""
    weights = weights_of(saved(trainer, path)).items()
    return {
        name: value.part(0, value.rows) if isinstance(value, SavedRows) else np.asarray(value)
        for name, value in weights
    }


def same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], name)


@pytest.mark.parametrize("kind", KINDS)
def test_grown_tables_are_those_of_a_larger_model_whose_further_rows_nothing_touched(
    tmp_path, kind
):
    optimizer, own = KINDS[kind]
    large = trained(trainer_of(LARGE, optimizer, **own), Steps(SMALL))
    small = trained(trainer_of(SMALL, optimizer, **own), Steps(SMALL))
    saved(small, tmp_path / "small")
    grown = trainer_of(LARGE, optimizer, seed=4, **own)
    assert load_grown(tmp_path / "small", grown, LARGE) == {"step": 4}
    same(everything(grown, tmp_path / "a"), everything(large, tmp_path / "b"))
    for run in (grown, large):  # from here on, all rows learn
        trained(run, Steps(LARGE, first=4))
    same(everything(grown, tmp_path / "c"), everything(large, tmp_path / "d"))


def shards_of(world, path, out):
    run = trainer_of(LARGE, world=world, placement="auto")
    assert not run.task.model.placement.is_whole
    load_grown(path, run, LARGE)
    Checkpoint.save(out, run.parameters, run.run, {}, world=world)


def test_grown_tables_are_split_as_others(tmp_path):
    small = trained(trainer_of(SMALL), Steps(SMALL))
    saved(small, tmp_path / "small")
    grown = trainer_of(LARGE)
    load_grown(tmp_path / "small", grown, LARGE)
    saved(grown, tmp_path / "grown")
    with Ranks(2) as ranks:
        results = ranks.call(shards_of, [(tmp_path / "small", tmp_path / "out")] * 2)
    assert results == [None, None]
    for file in (tmp_path / "grown" / "tables").iterdir():
        assert file.read_bytes() == (tmp_path / "out" / "tables" / file.name).read_bytes()


def grown_table(source, sizes, path, **own):
    """Loads a checkpoint into larger tables and saves it; returns the third table."""
    run = trainer_of(sizes, **own)
    load_grown(source, run, sizes)
    saved(run, path)
    return run.task.model.embeddings.tables()[2]


@pytest.mark.parametrize("init", ["uniform", "normal"])
def test_appended_rows_do_not_depend_on_how_many_are_appended_at_a_time(tmp_path, init):
    own = {"embedding_dim": 5, "bottom_mlp_sizes": (5,), "embedding_init": init}
    saved(trainer_of(SMALL, **own), tmp_path / "0")
    at_once = grown_table(tmp_path / "0", LARGE, tmp_path / "at once", **own)
    for i, size in enumerate((51, 120, 300)):  # an odd number, which shifts normal draws
        sizes = (10 + i, 6, size)
        table = grown_table(tmp_path / f"{i}", sizes, tmp_path / f"{i + 1}", **own)
    np.testing.assert_array_equal(table, at_once)


def test_a_row_is_appended_as_the_last_one_of_a_new_table(tmp_path):
    small = trainer_of(SMALL, embedding_init="uniform")
    saved(small, tmp_path / "small")
    grown = grown_table(tmp_path / "small", LARGE, tmp_path / "large", embedding_init="uniform")
    for size in (51, 300):
        task = Recommendation(DLRMConfig((10, 6, size), 2, DIM, (DIM,), (4, 1)), seed=3)
        new = task.model.embeddings.tables()[2][size - 1]
        np.testing.assert_allclose(grown[size - 1], new, rtol=1e-6)
    np.testing.assert_array_equal(grown[:50], small.task.model.embeddings.tables()[2])


@pytest.mark.parametrize(
    ("sizes", "error"),
    [
        ((10, 6), "expected the rows of 3 tables, got 2"),
        ((10, 5, 50), "table 1: expected 6 rows or more, got 5"),
    ],
)
def test_tables_that_cannot_grow_so_are_named(tmp_path, sizes, error):
    saved(trainer_of(SMALL), tmp_path / "small")
    with pytest.raises(ValueError, match=error):
        load_grown(tmp_path / "small", trainer_of(SMALL), sizes)


def test_hashed_ids_are_refused(tmp_path):
    saved(trainer_of(SMALL, hash_indices=True), tmp_path / "hashed")
    with pytest.raises(ValueError, match="--hash_indices takes ids modulo"):
        load_grown(tmp_path / "hashed", trainer_of(LARGE, hash_indices=True), LARGE)


def test_a_smaller_checkpoint_is_refused_with_what_makes_it_fit(tmp_path):
    saved(trainer_of(SMALL), tmp_path / "small")
    with pytest.raises(ValueError, match=r"\[10, 8\] in .*\n.*\n  --continue_from"):
        Checkpoint(tmp_path / "small").load(trainer_of(LARGE).parameters)
