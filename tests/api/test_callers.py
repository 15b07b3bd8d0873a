"""`dlrm.fit` and its models in programs of others: torch's settings, threads, forks, pickles."""

import contextlib
import copy
import gc
import importlib
import multiprocessing
import pickle
import signal
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import forked
import joblib
import numpy as np
import pyarrow as pa
import pytest
import test_fit
import torch
from test_fit import SCHEMA

import dlrm
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.reports.model_card import MODEL_CARD
from dlrm.train.trainer import Trainer

ROWS = 600
SETTINGS = {"embedding_dim": 4, "top_mlp_sizes": (16, 1), "epochs": 1, "batch_size": 64}
SETTINGS |= {"base_device": "cpu", "dropout": 0.4, "numerical_embedding": "piecewise"}


def table() -> pa.Table:
    return test_fit.table().slice(0, ROWS)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return dlrm.Dataset.from_arrow(table(), SCHEMA, tmp_path_factory.mktemp("callers") / "dataset")


@pytest.fixture(scope="module")
def scores(dataset):
    """Scores of a model that was trained, and predicts, with torch's usual settings."""
    return dlrm.fit(dataset, **SETTINGS).predict(table())


@pytest.fixture
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "callers",
    [
        (torch.no_grad(),),
        (torch.inference_mode(),),
        (torch.device("meta"), torch.autocast("cpu", torch.bfloat16)),
    ],
)
@pytest.mark.usefixtures("scores", "_float64")  # the fixture trains in float32
def test_what_a_caller_chose_for_torch_changes_nothing(callers, dataset, scores):
    with contextlib.ExitStack() as stack:
        [stack.enter_context(one) for one in callers]
        before = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
        model = dlrm.fit(dataset, **SETTINGS)
        assert np.array_equal(model.predict(table()), scores)
        assert np.array_equal(dlrm.load(model.path).predict(table()), scores)
        evaluated = model.evaluate(table())
        assert dlrm.api.training.judge_settings(dataset.path, **SETTINGS)["auc"] > 0.5
        after = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
    assert after == before
    assert evaluated == model.evaluate(table())


def test_dropout_in_threads_is_repeatable_and_leaves_the_callers_draws(dataset, scores):
    torch.manual_seed(3)
    undisturbed = torch.rand(4)
    torch.manual_seed(3)
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(dlrm.fit, dataset, **SETTINGS) for _ in range(3)]
        models = [one.result() for one in found]
    assert torch.equal(torch.rand(4), undisturbed)
    for model in models:
        assert np.array_equal(model.predict(table()), scores)


def test_the_import_sets_torchs_variables_and_neither_loads_torch_nor_changes_malloc():
    code = (
        "import os, sys, dlrm\n"
        "assert os.environ['GOMP_SPINCOUNT'] == '3000'\n"
        "assert not {'torch', 'dlrm.environment'} & set(sys.modules)\n"
        "dlrm.fit\n"
        "names = list(sys.modules)\n"
        "assert names.index('dlrm.environment') < names.index('torch')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("allowed", [True, False])
def test_tf32_holds_for_the_training_alone(allowed, dataset, monkeypatch):
    matmul, seen, fit = torch.backends.cuda.matmul, [], Trainer.fit
    monkeypatch.setattr(
        Trainer, "fit", lambda *given: (seen.append(matmul.fp32_precision), fit(*given))[1]
    )
    before = matmul.fp32_precision
    dlrm.fit(dataset, tf32=allowed, **SETTINGS)
    assert seen == ["tf32" if allowed else "ieee"]
    assert matmul.fp32_precision == before


def test_a_checkpoint_records_the_rows_of_each_split_and_no_temporary_folder(dataset, tmp_path):
    dlrm.fit(dataset, save_checkpoint_path=tmp_path / "named", **SETTINGS)
    named = Checkpoint.open(tmp_path / "named").path
    assert Checkpoint(named).config["splits"] == {"train": 432, "set_aside": 48, "test": 120}
    card = (named / MODEL_CARD).read_text()
    assert f"* source: `{dataset.path}`" in card
    assert "* rows: train 432, test 120, set_aside 48" in card
    dlrm.fit(table(), SCHEMA, save_checkpoint_path=tmp_path / "run", **SETTINGS)
    of_table = Checkpoint.open(tmp_path / "run").path
    card = (of_table / MODEL_CARD).read_text()
    assert "* source: a table in memory" in card
    assert "--dataset=" not in card
    flags = Checkpoint(of_table).config["flags"]
    assert flags["base_device"] == "cpu"
    assert flags["num_numerical_features"] == len(SCHEMA["numerical"])
    assert not {"save_checkpoint_path", "log_path", "backend"} & flags.keys()


def copies(model, folder):
    joblib.dump(model, folder / "model.joblib")
    yield "joblib", joblib.load(folder / "model.joblib")
    yield "pickle", pickle.loads(pickle.dumps(model))
    yield "deepcopy", copy.deepcopy(model)


@pytest.mark.parametrize("kind", ["trained", "listed"])
def test_a_copy_of_a_model_has_its_scores(kind, tmp_path, request):
    found = request.getfixturevalue(kind)
    model = dlrm.load(found.checkpoint)
    model.results = {"test_auc": 0.5}
    rows = found.rows
    expected = model.predict(rows)  # which also fills what a transform keeps
    for name, one in copies(model, tmp_path):
        assert np.array_equal(one.predict(rows), expected), name
        assert one.results == model.results, name


def test_a_copy_of_a_model_from_memory_outlives_it(dataset, tmp_path):
    model = dlrm.fit(table(), SCHEMA, **SETTINGS)
    expected, made = model.predict(table()), [one for _, one in copies(model, tmp_path)]
    path = model.path
    del model
    gc.collect()
    assert not path.exists()
    for one in made:
        assert np.array_equal(one.predict(table()), expected)
        with pytest.raises(FileNotFoundError, match="checkpoint is gone"):
            one.save(tmp_path / "saved")


def _fork_and_work(connection, dataset):
    """In a process with two threads: trains and scores, and forks a child that does the same."""
    importlib.import_module("sklearn.ensemble")  # with another OpenMP of its own
    torch.set_num_threads(2)
    wide = {**SETTINGS, "top_mlp_sizes": (512, 512, 1), "batch_size": 480}
    rows = pa.concat_tables([table()] * 20)
    model = dlrm.fit(dataset, **wide)
    expected = model.predict(rows)
    torch.rand(3000, 300).relu()  # certainly in several threads

    def child(answer):
        signal.alarm(20)
        again = dlrm.fit(dataset, **wide).predict(rows)
        answer.send((np.array_equal(model.predict(rows), expected), again, torch.get_num_threads()))

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=child, args=[sender])
    process.start()
    sender.close()
    same, again, threads = receiver.recv()  # EOFError: the child was killed
    process.join()
    parent = np.array_equal(model.predict(rows), expected)
    connection.send((same, np.array_equal(again, expected), parent, threads))


def test_a_forked_child_of_a_process_that_has_trained_trains_and_scores(dataset):
    receiver, sender = forked.CONTEXT.Pipe(duplex=False)
    process = forked.CONTEXT.Process(target=_fork_and_work, args=[sender, dataset])
    process.start()
    sender.close()
    assert receiver.recv() == (True, True, True, 2)
    process.join()


def test_a_run_of_one_step_trains_by_default(dataset):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the model is no better than a constant")
        one = dlrm.fit(dataset, max_steps=1, **SETTINGS)
    idle = dlrm.fit(dataset, max_steps=1, freeze_embeddings=True, lr=1e-9, **SETTINGS)
    assert not np.allclose(one.predict(table()), idle.predict(table()), rtol=1e-4)
