"""`--recipe auto` and `dlrm.fit(recipe="auto")` choose what fits the rows, and say what."""

import re
import shlex
import shutil

import numpy as np
import pytest
import torch
from small_dataset import NUM_NUMERICAL, TABLE_SIZES, write_dataset

import dlrm
from dlrm.model.config import DLRMConfig
from dlrm.scripts.common import click_command, dlrm_flags
from dlrm.tasks.recipe import DatasetFacts, auto
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.optim.config import OptimizerConfig

ROWS = {"train": 2000, "test": 300}
SHORT = ["--base_device=cpu", "--max_steps=5", "--log_path=log.json"]
FEW = DatasetFacts(26_000, NUM_NUMERICAL, TABLE_SIZES, 0.25)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("recipe") / "dataset", ROWS)


@pytest.fixture
def train(dataset, tmp_path, monkeypatch):
    """Trains by the command in this process; returns the checkpoint's directory."""
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)

    def run(name, *words, defaults=None):
        words = [f"--dataset={dataset}", f"--save_checkpoint_path={name}", *SHORT, *words]
        flags = dlrm_flags.make_flags(defaults)
        values = dlrm_flags.parse(words, flags)
        click_command.run(values)
        return Checkpoint.open(tmp_path / name).path

    return run


def weights(folder):
    files = [folder / "dense.safetensors", *sorted((folder / "tables").iterdir())]
    return [file.read_bytes() for file in files]


def test_it_knows_shared_tables():
    shared = FEW._replace(field_tables=(0, 1, 0, 2))
    assert str(shared).endswith("4 categorical fields in 3 tables")
    assert "tables" not in str(FEW)


def test_printed_flags_and_the_python_api_train_the_same_model(train, dataset, tmp_path, capsys):
    auto_ran = train("auto", "--recipe=auto", "--lr=0.004")
    joined = capsys.readouterr().out.replace(" \\\n", "")  # as a shell reads the flags
    said, flags = re.search("^(--recipe auto, .*):\n(.*)", joined, re.M).groups()
    assert "1,800 training rows" in said  # of 2,000, since a tenth is set aside
    assert "3 numerical and 4 categorical" in said
    assert "--lr" not in flags
    copied = train("copied", "--lr=0.004", *shlex.split(flags))
    short = {"base_device": "cpu", "max_steps": 5}
    fitted = dlrm.fit(dataset, recipe="auto", lr=0.004, **short)
    assert weights(auto_ran) == weights(copied) == weights(fitted.path)
    saved, theirs = (Checkpoint(folder).config["flags"] for folder in (auto_ran, copied))
    different = {name for name in saved if saved[name] != theirs[name]}
    assert different == {"recipe", "save_checkpoint_path"}
    from_dist_main = train("dist", "--recipe=auto", "--lr=0.004", defaults=dlrm_flags.DIST_MAIN)
    assert weights(from_dist_main) == weights(auto_ran)


def test_a_run_by_a_recipe_is_resumed_and_its_weights_are_trained_on(train, capsys):
    words = ["--recipe=auto", "--checkpoint_freq=3", "--test_freq=5", "--keep_checkpoints=2"]
    last = train("run", *words)
    whole = weights(last)
    shutil.rmtree(last)
    assert weights(train("run", *words, "--resume")) == whole
    assert "resumed from" in capsys.readouterr().out
    train("small", "--recipe=auto", "--embedding_dim=4", "--top_mlp_sizes=8,1")
    further = train("further", "--recipe=auto", "--load_checkpoint_path=small")
    flags = Checkpoint(further).config["flags"]
    assert (flags["embedding_dim"], flags["top_mlp_sizes"]) == (4, [8, 1])


GIVEN = [
    {"batch_size": 64, "epochs": 3, "lr": 0.01, "dropout": 0.0, "wide": False},
    {"bottom_mlp_sizes": (8, 4)},
    {"embedding_dim": 12},
    {"top_mlp_sizes": (1,)},
    {"warmup_steps": 5000},
    {"schedule": "nvidia"},
    {"schedule": "cosine", "warmup_unit": "epochs"},
    {"embedding_optimizer": "sgd", "lr": 300.0},
    {"freeze_embeddings": True, "freeze_mlps": True},
    {"numerical_embedding": "none"},
    {"embedding_l2": 0.0},
]


@pytest.mark.parametrize("given", GIVEN, ids=",".join)
def test_what_was_given_stays_and_the_rest_fits(given, dataset):
    settings = auto(FEW, given)
    assert {name: settings[name] for name in given} == given
    short = {"max_steps": 1, "recipe": "auto", "base_device": "cpu"}
    assert np.isfinite(dlrm.fit(dataset, **short, **given).results["test_log_loss"])


@pytest.mark.parametrize(
    ("given", "left_out"),
    [
        ({"cuda_graphs": True}, {"embedding_l2"}),
        ({"numerical_embedding": "none"}, {"numerical_bins"}),
    ],
)
def test_what_a_given_flag_makes_impossible_is_not_chosen(given, left_out):
    assert left_out <= auto(FEW).keys()
    assert not left_out & auto(FEW, given).keys()


def test_quadratic_layers_without_a_top_mlp_keep_their_dropout():
    sizes = {"top_mlp_sizes": (1,)}
    assert "dropout" not in auto(FEW, sizes)
    assert auto(FEW, {**sizes, "interaction_op": "quadratic"})["dropout"] == 0.3


def test_a_penalty_of_all_rows_is_not_chosen_where_it_is_refused():
    assert auto(FEW, {"placement": "auto"})["embedding_l2_mode"] == "looked_up"
    assert "embedding_l2_mode" not in auto(FEW)


def test_few_rows_and_members_of_a_packed_ensemble_have_a_higher_rate_and_epochs():
    few, many = FEW._replace(table_sizes=(60, 40)), FEW._replace(rows=100_000)
    assert auto(many)["lr"] < auto(few)["lr"] == auto(FEW)["lr"]
    packed = auto(few, {"ensemble": 8})
    assert packed == auto(few, {"ensemble": 1}) | {"ensemble": 8, "lr": 2 * auto(few)["lr"]}
    rare = few._replace(rows=36_000, click_rate=0.117)  # fewer samples than the most epochs have
    assert [auto(rare, {"ensemble": count})["epochs"] for count in (1, 2, 8)] == [5, 8, 8]
    assert auto(rare, {"ensemble": 8})["batch_size"] == auto(rare)["batch_size"]
    given = {"ensemble": 8, "lr": 0.001, "epochs": 3}
    assert auto(few, given).items() >= given.items()
    for facts, ensemble in ((many, 8), (FEW, 8), (few, "dot*2,quadratic")):  # FEW has many ids
        assert auto(facts, {"ensemble": ensemble}) == auto(facts) | {"ensemble": ensemble}


def test_rows_with_many_ids_have_fewer_epochs_and_bins():
    few = FEW._replace(table_sizes=(60, 40))
    many = FEW._replace(table_sizes=(20_000, 40))
    assert [auto(facts)["epochs"] for facts in (few, many)] == [10, 4]
    assert [auto(facts)["numerical_bins"] for facts in (few, many)] == [256, 64]
    assert auto(many, {"epochs": 9})["epochs"] == 9
    assert auto(many._replace(rows=200_000))["epochs"] == 2  # as many samples as with few ids
    epochs = [auto(many._replace(rows=rows))["epochs"] for rows in (700_000, 1_000_000)]
    assert epochs == [2, 1]
    rare = many._replace(rows=700_000, click_rate=0.03)
    assert auto(rare)["epochs"] == 1
    halves = few._replace(table_sizes=(130, 130))
    assert auto(halves)["epochs"] == 4
    assert auto(halves._replace(field_tables=(0, 0)))["epochs"] == 10  # a shared table is one


def test_big_data_have_one_epoch_and_nvidias_architecture():
    default = DLRMConfig(TABLE_SIZES)
    for rows in (40_000_000, 4_000_000_000):
        settings = auto(DatasetFacts(rows, 13, TABLE_SIZES, 0.03))
        assert settings["epochs"] == 1
        config = DLRMConfig(
            TABLE_SIZES, **{k: v for k, v in settings.items() if hasattr(default, k)}
        )
        parts = ("embedding_dim", "bottom_mlp_sizes", "top_mlp_sizes", "interaction_op", "wide")
        for name in (*parts, "numerical_embedding", "dropout"):
            assert getattr(config, name) == getattr(default, name)
        assert not {"embedding_l2", "weight_decay"} & settings.keys()
    assert settings == {"epochs": 1}
    assert OptimizerConfig(embedding_optimizer=auto(FEW)["embedding_optimizer"])


def test_the_note_of_a_short_run_names_the_recipe(train, capsys):
    train("run", "--warmup_steps=100", "--decay_start_step=100", "--lr=0.1")
    note = re.search("note: this run has .*", capsys.readouterr().out)[0]
    assert "--recipe auto chooses flags from the rows. Flags that fit" in note
