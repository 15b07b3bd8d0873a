"""Roles of rows: which choose the best weights, and which report."""

import json
import re
import shutil

import forked
import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from small_dataset import MODEL, NUM_NUMERICAL, ROWS, RUN, TABLE_SIZES, write_dataset

import dlrm
from dlrm.data import layout
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.scripts.common import click_command, dlrm_flags
from dlrm.train.checkpoints.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def two_splits(tmp_path_factory):
    """Directory of a dataset without validation rows."""
    rows = {"train": ROWS["train"], "test": ROWS["test"]}
    return write_dataset(tmp_path_factory.mktemp("roles") / "dataset", rows)


def train(data, *flags):
    """Trains by the command and saves to `run`; returns the summary."""
    words = [f"--dataset={data}", "--base_device=cpu", *MODEL, *RUN, "--save_checkpoint_path=run"]
    return click_command.run(dlrm_flags.parse([*words, *flags]))


def test_without_a_directory_for_them_no_weights_are_chosen(two_splits, capsys):
    words = [f"--dataset={two_splits}", "--base_device=cpu", *MODEL, *RUN, "--set_aside=0.1"]
    click_command.run(dlrm_flags.parse(words))
    said = "the last 400 of 4,000 training rows are tested during the training and do not train (--"
    assert said in capsys.readouterr().out


def changed_test_labels(data, folder):
    """Copies a dataset, with test labels of 0 and 1 exchanged."""
    shutil.copytree(data, folder)
    spec = FeatureSpec.load(folder)
    file = spec.file("test", spec.label)
    (1 - np.fromfile(file, np.uint8)).tofile(file)
    layout.write_dataset_manifest(
        folder, {s: spec.num_rows(s) for s in spec.splits}, TABLE_SIZES, {}
    )
    return folder


def test_test_rows_that_report_choose_nothing(two_splits, tmp_path):
    settings = {
        "epochs": 3,
        "embedding_dim": 4,
        "base_device": "cpu",
        "batch_size": 256,
        "lr": 0.05,
    }
    model = dlrm.fit(two_splits, test_freq=5, **settings)
    other = dlrm.fit(changed_test_labels(two_splits, tmp_path / "other"), test_freq=5, **settings)
    assert model.path.name == other.path.name
    for name, weight in model.model.state_dict().items():
        assert weight.equal(other.model.state_dict()[name])
    results, others = model.results, other.results
    assert (results["selection_split"], results["holdout_split"]) == ("set_aside", "test")
    assert results["test_auc"] == pytest.approx(1 - others["test_auc"], abs=1e-9)
    assert results["best_auc"] == results["set_aside_auc"] == others["set_aside_auc"]
    assert results["best_validation_loss"] == results["set_aside_log_loss"]
    assert results["test_auc"] == pytest.approx(judged(model, two_splits, slice(None), "test"))
    aside = judged(model, two_splits, slice(3600, None), "train")
    assert results["set_aside_auc"] == pytest.approx(aside, abs=1e-6)


def judged(model, data, rows, split):
    """Returns scikit-learn's AUC of a model's scores for rows of a split."""
    spec = FeatureSpec.load(data)
    numerical = np.fromfile(spec.file(split, "num_0"), np.float16).reshape(-1, NUM_NUMERICAL)
    ids = [np.fromfile(spec.file(split, name), spec.dtype(name)) for name in spec.categorical]
    labels = np.fromfile(spec.file(split, spec.label), bool)
    with torch.no_grad():
        scores = model.model(torch.tensor(numerical), torch.tensor(np.stack(ids, axis=1)))
    return roc_auc_score(labels[rows], scores[rows])


def test_of_three_splits_test_chooses_and_validation_reports(dataset):
    results = dlrm.fit(dataset, epochs=1, embedding_dim=4, base_device="cpu").results
    assert (results["selection_split"], results["holdout_split"]) == ("test", "validation")
    assert results["best_auc"] == results["test_auc"]
    assert {"validation_auc", "validation_log_loss"} <= results.keys()
    assert not any(name.startswith("set_aside") for name in results)


def test_a_recipe_sets_rows_aside_and_says_so(two_splits, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    summary = train(two_splits, "--recipe=auto")
    assert (summary["selection_split"], summary["holdout_split"]) == ("set_aside", "test")
    shown = capsys.readouterr().out
    assert re.search(r"^--recipe auto, of 3,600 .* fields:\n  --set_aside=0.1 ", shown, re.M)
    assert (
        "set aside: the last 400 of 4,000 training rows choose the best weights and do not train; "
        "test rows are hold-out rows\n" in shown
    )
    assert "rows: train 3,600, test 1,500, validation 0, set_aside 400\n" in shown
    for name, role in (("set_aside", "selection"), ("test", "hold-out")):
        auc = summary[f"{name}_auc"]
        assert re.search(
            rf"^Final weights \(best, .*\)\. {name}, {role}: auc {auc:.6f}", shown, re.M
        )
    best = Checkpoint.open(tmp_path / "run").path
    card = (best / "MODEL.md").read_text()
    assert "* rows: train 3,600, test 1,500, set_aside 400\n" in card
    assert "Best set_aside, selection, after step" in card
    assert "Selection rows, which chose the best weights: set_aside.\n" in card
    assert "Hold-out rows, which judge them: test.\n" in card
    resumed = train(two_splits, "--recipe=auto", "--resume")
    assert resumed["test_auc"] == summary["test_auc"]


def test_rows_are_not_set_aside_where_others_choose_and_report(dataset, two_splits):
    with pytest.raises(ValueError, match=r"^set_aside=0.2: expected a dataset without test or"):
        dlrm.fit(dataset, set_aside=0.2, base_device="cpu")
    with pytest.raises(ValueError, match=r"^set_aside=1.0: expected 0 or more, less than 1$"):
        dlrm.fit(two_splits, set_aside=1.0, base_device="cpu")
    with pytest.raises(ValueError, match=r"^set_aside=1e-09: expected training rows to set as"):
        dlrm.fit(two_splits, set_aside=1e-9, base_device="cpu")


@pytest.mark.parametrize(("recipe", "role"), [([], "selection, "), (["--recipe=auto"], "")])
def test_rows_of_a_recalibration_report_no_more(recipe, role, two_splits, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    train(two_splits, "--max_steps=20", *recipe, "--set_aside=0.1" if recipe else "--set_aside=0")
    words = [f"--dataset={two_splits}", "--bootstrap=0"]
    fit = ["--recalibrate", "--recalibrated_checkpoint=fitted"]
    forked.call("dlrm.scripts.evaluate", "--checkpoint=run", *words, *fit, code=0)
    for split, expected in (("test", f"{role}recalibrated on"), ("train", None)):
        done = forked.call(
            "dlrm.scripts.evaluate", "--checkpoint=fitted", *words, f"--split={split}"
        )
        shown = ", ".join(filter(None, (split, expected)))
        assert f"fitted on {two_splits} ({shown}): " in done.stdout


def test_each_seed_has_the_best_metrics_of_the_rows_that_chose(two_splits, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = train(two_splits, "--seeds=1,2", "--set_aside=0.1")
    chose = []
    for seed in (1, 2):
        best = Checkpoint.open(tmp_path / f"run/seed-{seed}").path
        (auc,) = re.findall(r"^\| auc \| (\S+) \|$", (best / "MODEL.md").read_text(), re.M)
        summary = (best.parent / "log.json").read_text().splitlines()[-1]
        metrics = json.loads(summary.removeprefix("DLLL "))["data"]
        assert f"{metrics['set_aside_auc']:.6f}" == auc != f"{metrics['test_auc']:.6f}"
        chose.append(metrics["set_aside_auc"])
    assert found["set_aside_auc"] == pytest.approx(sum(chose) / 2)
