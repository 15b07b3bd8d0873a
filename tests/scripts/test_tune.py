"""`dlrm tune` searches settings on training rows only; its study resumes and is shared."""

import shutil
import time

import forked
import numpy as np
import pytest
from small_dataset import write_dataset

import dlrm
from dlrm.data import bags, layout
from dlrm.data.bags import Jagged, ListField
from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import open_datasets
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.writer import SplitWriter
from dlrm.scripts.tune import TuneConfig, main, open_study, write_fold

TUNE = "dlrm.scripts.tune"
SPACE = """
lr: {low: 0.002, high: 0.05, log: true}
epochs: {low: 1, high: 2}
embedding_dim: [2, 4]
top_mlp_sizes: [[16, 1], [8, 1]]
batch_size: 128
schedule: linear
"""
ROWS = {"train": 3000, "test": 10}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("tune") / "dataset", ROWS)


@pytest.fixture(scope="module")
def space(tmp_path_factory):
    path = tmp_path_factory.mktemp("space") / "space.yaml"
    path.write_text(SPACE)
    return path


def arguments(dataset, space, output, *others):
    given = {"dataset": dataset, "output": output, "space": space, "processes": 1, "trials": 5}
    return [*(f"--{name}={value}" for name, value in given.items()), "--eta=2", *others]


def results(output):
    return {name: (output / name).read_bytes() for name in ("tuning.txt", "best.flags")}


def trials(output):
    """Returns the finished trials of a study, by their numbers."""
    study = open_study(TuneConfig(output, output, eta=2))
    done = [t for t in study.trials if t.state.is_finished() and "results" in t.user_attrs]
    return {t.user_attrs["trial"]: t for t in done}


@pytest.fixture(scope="module")
def searched(dataset, space, tmp_path_factory):
    output = tmp_path_factory.mktemp("searched") / "out"
    assert main(arguments(dataset, space, output)) == 0
    return output


def test_the_best_settings_train_by_the_command(searched, dataset, tmp_path):
    head, best, second, *_, roles = (searched / "tuning.txt").read_text().splitlines()
    assert head.split()[:4] == ["trial", "steps", "auc", "log_loss"]
    assert best.split()[1] == second.split()[1] == "100%"
    assert float(best.split()[2]) >= float(second.split()[2])
    assert float(best.split()[2]) > 0.65
    assert roles.startswith("metrics are of held-out training rows; test and ")
    shown = {path.name for path in searched.iterdir() if path.name != ".lock"}
    assert shown == {"study.journal", "tuning.txt", "best.flags"}
    where = [f"--dataset={dataset}", f"--flagfile={searched / 'best.flags'}"]
    done = forked.succeed("dlrm.scripts.main", *where, "--base_device=cpu", cwd=tmp_path)
    assert "selection_split : set_aside\n" in done.stdout  # the dataset has no validation rows


def test_a_trial_is_a_training_by_its_settings(searched, dataset, tmp_path):
    write_fold(TuneConfig(dataset, tmp_path), 0, tmp_path / "fold")
    trial = next(t for t in trials(searched).values() if t.state.name == "COMPLETE")
    # Tests during a training change nothing, and nothing is chosen during a trial.
    fixed = {"recipe": "auto", "seed": 1, "test_freq": 10**6, "set_aside": 0.0}
    own = trial.user_attrs["settings"]
    model = dlrm.fit(tmp_path / "fold", base_device="cpu", **fixed, **own)
    for name in ("auc", "log_loss"):
        assert trial.user_attrs["results"][name] == [model.results[f"test_{name}"]]


def test_trials_that_are_behind_end_early(searched):
    found = trials(searched).values()
    assert {trial.state.name for trial in found} == {"COMPLETE", "PRUNED"}
    for trial in found:
        assert {*trial.intermediate_values} <= {1, 2, 3, 4}  # quarters of the steps
        assert (4 in trial.intermediate_values) == (trial.state.name == "COMPLETE")


def test_test_rows_are_not_opened(searched, dataset, space, tmp_path):
    shutil.copytree(dataset, tmp_path / "dataset")
    for path in (tmp_path / "dataset/test").iterdir():
        path.write_bytes(b"\xff" * path.stat().st_size)
    assert main(arguments(tmp_path / "dataset", space, tmp_path / "out")) == 0
    assert results(tmp_path / "out") == results(searched)


def test_a_search_that_was_killed_goes_on(dataset, space, tmp_path):
    assert main(arguments(dataset, space, tmp_path / "whole", "--rungs=1")) == 0
    words = arguments(dataset, space, tmp_path / "out", "--rungs=1")
    process = forked.start(TUNE, *words, stdout=tmp_path / "log")
    journal, deadline = tmp_path / "out/study.journal", time.monotonic() + 120
    while time.monotonic() < deadline and not (
        journal.exists() and journal.read_text().count("results") >= 3
    ):
        time.sleep(0.01)
    process.kill()
    process.join()
    assert not (tmp_path / "out/tuning.txt").exists()
    first = trials(tmp_path / "out")
    assert 2 <= len(first) < 5
    with open(journal, "a") as file:
        file.write('{"op_code": 5, "half')  # of a line, as a kill within a write leaves it
    assert main(words) == 0
    assert first.items() <= trials(tmp_path / "out").items()  # they were not trained again
    assert results(tmp_path / "out") == results(tmp_path / "whole")


def test_two_commands_share_a_study(dataset, space, tmp_path):
    words = arguments(dataset, space, tmp_path / "out", "--trials=6")
    both = [forked.start(TUNE, *words, stdout=tmp_path / f"log{n}") for n in (1, 2)]
    for process in both:
        process.join()
    assert sorted(trials(tmp_path / "out")) == [0, 1, 2, 3, 4, 5]
    logs = "".join((tmp_path / f"log{n}").read_text() for n in (1, 2))
    assert all(logs.count(f"trial {number}: auc") == 1 for number in range(6))
    assert len((tmp_path / "out/tuning.txt").read_text().splitlines()) == 8


def test_more_trials_take_what_is_known(searched, dataset, space, tmp_path):
    shutil.copytree(searched, tmp_path / "out")
    assert main(arguments(dataset, space, tmp_path / "out", "--trials=6", "--processes=2")) == 0
    assert trials(searched).items() <= trials(tmp_path / "out").items()
    assert len(trials(tmp_path / "out")) == 6


def refused(capsys, *words):
    assert main([str(word) for word in words]) in (1, 2)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_another_search_is_refused_by_name(searched, dataset, space, tmp_path, capsys):
    shutil.copytree(searched, tmp_path / "out")
    words = arguments(dataset, space, tmp_path / "out")
    assert "--seed: expected 1, got 2" in refused(capsys, *words, "--seed=2")
    (tmp_path / "other.yaml").write_text(SPACE.replace("128", "64"))
    error = refused(capsys, *words, f"--space={tmp_path / 'other.yaml'}")
    assert "--space, batch_size: expected 128, got 64" in error
    assert "exists, and is no search" in refused(capsys, *words, f"--output={dataset}")
    other = write_dataset(tmp_path / "other", ROWS, seed=5)
    error = refused(capsys, *arguments(other, space, tmp_path / "out"))
    assert "--dataset: expected '" in error


def test_a_damaged_dataset_is_refused(dataset, space, tmp_path, capsys):
    shutil.copytree(dataset, tmp_path / "changed")
    labels = tmp_path / "changed/train/label.bin"
    labels.write_bytes(bytes([1 - labels.read_bytes()[0]]) + labels.read_bytes()[1:])
    error = refused(capsys, *arguments(tmp_path / "changed", space, tmp_path / "new"))
    assert f"{labels}: expected CRC-32" in error


@pytest.mark.parametrize("content", ["no JSON\n{}\n", "\xff\n"])
def test_a_journal_that_cannot_be_read_is_named(dataset, space, tmp_path, capsys, content):
    (tmp_path / "out").mkdir()
    journal = tmp_path / "out/study.journal"
    journal.write_bytes(content.encode("latin1"))
    error = refused(capsys, *arguments(dataset, space, tmp_path / "out"))
    assert f"{journal}: expected a journal of Optuna, got" in error
    assert journal.read_bytes() == content.encode("latin1")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("dropuot: 0.1", "dropuot: expected a setting among"),
        ("lr: {low: 0.1, high: 0.01}", "`low <= high` must hold"),
        ("lr: {low: a, high: 1}", "space.yaml: lr {"),
        ("lr: {lowest: 0}", "space.yaml: lr {'lowest': 0}: "),
        ("lr: []", "space.yaml: lr []: "),
        ("lr: [0.1, fast]", "lr: expected float, got 'fast'"),
        ("epochs: {low: 0.5, high: 2}", "epochs: expected int, got 0.5"),
        ("dropout: [2.0]", "--dropout 2.0: expected 0 or more, less than 1"),
    ],
)
def test_a_space_that_is_none_is_named(dataset, tmp_path, capsys, text, named):
    (tmp_path / "space.yaml").write_text(text)
    words = arguments(dataset, tmp_path / "space.yaml", tmp_path / "out", "--trials=2")
    assert named in refused(capsys, *words)


def test_a_trial_that_diverges_is_the_last(dataset, tmp_path):
    (tmp_path / "space.yaml").write_text("{lr: [1.0e+38], batch_size: 128, epochs: 1}")
    words = arguments(dataset, tmp_path / "space.yaml", tmp_path / "out", "--trials=2", "--rungs=1")
    assert main(words) == 0
    lines = (tmp_path / "out/tuning.txt").read_text().splitlines()
    assert "diverged" in lines[-2]  # before the roles


def test_folds_are_trained_one_after_another(dataset, space, tmp_path, capsys):
    words = arguments(dataset, space, tmp_path / "out", "--folds=3", "--trials=2")
    assert main(words) == 0
    assert " ± " in capsys.readouterr().out
    first, second = (t.user_attrs["results"]["auc"] for t in trials(tmp_path / "out").values())
    assert len(first) == 3
    assert len(second) <= 3


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """A dataset whose rows hold their number as an id, in a list and as a weight."""
    directory, rows = tmp_path_factory.mktemp("numbered") / "dataset", 1000
    places = np.arange(rows)
    sizes = {"row": rows, "list": rows}
    lists = {"list": ListField(3, weighted=True)}
    spec = FeatureSpec.named(
        directory / layout.FEATURE_SPEC, "label", ["x"], sizes, ["train", "test"], lists=lists
    )
    lengths = (places % 3).astype(lists["list"].lengths_dtype)
    for split in ("train", "test"):
        with SplitWriter(spec, split) as writer:
            items = np.repeat(places, lengths)
            ids = [places, Jagged(items, lengths, items / 8)]
            writer.write(places % 2, places[:, None] / 2, ids)
        weights = (places / 4).astype(layout.WEIGHT_DTYPE)
        weights.tofile(directory / split / layout.WEIGHT_FILE)
    spec.save()
    layout.write_dataset_manifest(directory, {"train": rows, "test": rows}, [rows] * 2, {})
    assert bags.num_starts(rows) == 2
    return directory


def rows_of(directory):
    """Checks the columns of a part's splits; returns their row numbers."""
    found = []
    datasets = open_datasets(DataConfig(dataset=str(directory)))
    for dataset in (datasets.train, datasets.test):
        batch = dataset.batch(0)
        lengths = batch.lengths.numpy()
        ends = np.cumsum(lengths.sum(1))
        rows = batch.categorical.numpy()[ends - lengths.sum(1)]
        np.testing.assert_array_equal(lengths[:, 1], rows % 3)
        items = np.repeat(rows, 1 + rows % 3)
        np.testing.assert_array_equal(batch.categorical, items)
        factors = items / 8
        factors[ends - lengths.sum(1)] = 1  # of the field with one id each
        np.testing.assert_array_equal(batch.id_weights, factors)
        np.testing.assert_array_equal(batch.numerical[:, 0], rows / 2)
        np.testing.assert_array_equal(batch.labels, rows % 2)
        np.testing.assert_array_equal(batch.weights, rows / 4)
        found.append(rows)
    return found


def test_each_row_is_held_out_in_one_fold(numbered, tmp_path):
    judged = []
    for fold in range(3):
        path = tmp_path / str(fold)
        write_fold(TuneConfig(numbered, tmp_path, folds=3, seed=7), fold, path)
        train, test = rows_of(path)
        np.testing.assert_array_equal(np.sort(np.concatenate([train, test])), np.arange(1000))
        assert (np.diff(train) > 0).all()
        judged.append(test)
    np.testing.assert_array_equal(np.sort(np.concatenate(judged)), np.arange(1000))
    assert [len(one) for one in judged] == [334, 333, 333]


def test_a_share_or_the_last_rows_are_held_out(numbered, tmp_path):
    write_fold(TuneConfig(numbered, tmp_path, seed=7), 0, tmp_path / "random")
    train, test = rows_of(tmp_path / "random")
    assert (len(train), len(test)) == (800, 200)
    assert 20 < (test >= 800).sum() < 60
    write_fold(TuneConfig(numbered, tmp_path, order="last"), 0, tmp_path / "last")
    train, test = rows_of(tmp_path / "last")
    np.testing.assert_array_equal(train, np.arange(800))
    np.testing.assert_array_equal(test, np.arange(800, 1000))


@pytest.mark.slow
def test_without_a_space_the_default_one_is_searched(dataset, tmp_path):
    words = [f"--dataset={dataset}", f"--output={tmp_path / 'out'}", "--processes=1"]
    assert main([*words, "--trials=2", "--rungs=1"]) == 0
    found = trials(tmp_path / "out")
    first, second = (found[number].user_attrs["settings"] for number in (0, 1))
    assert first == {}  # the recipe's
    assert (tmp_path / "out/best.flags").read_text().splitlines()[0] == "--recipe=auto"
    assert {"embedding_l2", "dropout", "lr", "batch_size", "epochs"} < set(second)
