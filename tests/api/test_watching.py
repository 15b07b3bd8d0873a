"""A program watches a training of `dlrm.fit`, ends it, and adds metrics to its tests."""

import sys

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score
from test_fit import SCHEMA, table

import dlrm
from dlrm.train.reports.console import is_watched

SETTINGS = {"embedding_dim": 4, "top_mlp_sizes": (8, 1), "batch_size": 64, "base_device": "cpu"}
SETTINGS |= {"epochs": 2, "test_freq": 10, "print_freq": 5}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    rows = table().slice(0, 2000)
    return dlrm.Dataset.from_arrow(rows, SCHEMA, tmp_path_factory.mktemp("watched") / "dataset")


def test_functions_see_each_test_and_line_and_end_the_training(dataset):
    steps, tests = [], []

    def on_test(step, metrics):
        tests.append((step, metrics["auc"]))
        return step == 20

    model = dlrm.fit(
        dataset, on_test=on_test, on_step=lambda *given: steps.append(given), **SETTINGS
    )
    assert [step for step, _ in tests] == [10, 20]
    assert [step for step, _ in steps] == [6, 11, 16]
    assert all(set(values) == {"loss", "lr"} for _, values in steps)
    assert model.results["best_auc"] == max(auc for _, auc in tests)
    assert model.results["test_auc"] > 0.5, "reports are as at the end of the last epoch"


def test_a_training_that_on_step_ends_is_tested(dataset):
    watched = {
        "on_step": lambda step, _: np.int64(step) > 5,
        "on_test": lambda step, _: seen.append(step),
    }
    seen = []
    model = dlrm.fit(dataset, **watched, **{**SETTINGS, "test_freq": 40})
    assert seen == [6]
    assert "test_auc" in model.results


@pytest.mark.parametrize(("name", "kind"), [("on_step", KeyError), ("on_test", KeyboardInterrupt)])
def test_a_function_that_raises_ends_the_run_whole(name, kind, dataset, tmp_path):
    def fails(step, values):
        raise kind("a fault of the program")

    with pytest.raises(kind, match="a fault of the program"):
        dlrm.fit(dataset, save_checkpoint_path=tmp_path / "run", **{name: fails}, **SETTINGS)
    saved = dlrm.load(tmp_path / "run")
    assert int(saved.path.name.removeprefix("step-")) == (6 if name == "on_step" else 10)
    assert np.isfinite(saved.predict([{"price": 1.0, "shop": "s3", "user": "u1"}])).all()


def test_a_function_that_would_never_run_is_refused(dataset):
    def yields(step, values):
        yield values

    with pytest.raises(ValueError, match="^on_test: expected a function that neither yields nor"):
        dlrm.fit(dataset, on_test=yields, **SETTINGS)


def test_metrics_of_the_program_are_reported_and_kept(dataset, tmp_path):
    own = {
        "precision": average_precision_score,
        "none": lambda labels, scores: torch.tensor(np.nan),
    }
    seen = []
    model = dlrm.fit(
        dataset,
        metrics=own,
        on_test=lambda _, metrics: seen.append(metrics["precision"]),
        save_checkpoint_path=tmp_path / "run",
        **SETTINGS,
    )
    found = model.evaluate(dataset, "test", metrics=own)
    assert found["precision"] == pytest.approx(model.results["test_precision"], abs=1e-6)
    assert model.results["set_aside_precision"] in seen
    assert "precision" in str(dlrm.load(tmp_path / "run"))
    assert np.isnan(dlrm.load(tmp_path / "run").results["test_none"])


def test_a_bar_shows_steps_and_figures_where_someone_watches(dataset, capsys, monkeypatch):
    quick = {**SETTINGS, "max_steps": 12}
    dlrm.fit(dataset, **quick)
    assert capsys.readouterr() == ("", "")
    dlrm.fit(dataset, progress=True, **quick)
    out, shown = capsys.readouterr()
    assert out == ""
    assert "12/12" in shown
    assert "AUC 0." in shown
    assert "loss 0." in shown
    dlrm.fit(dataset, progress=True, verbose=True, **quick)
    assert "step/s" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert is_watched()
    dlrm.fit(dataset, progress=False, **quick)
    assert capsys.readouterr() == ("", "")
