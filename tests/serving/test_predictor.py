"""`dlrm.load(DIR).predict(rows)`: the scores that testing gives, from raw rows."""

import math
import shutil
import threading

import numpy as np
import pandas
import pytest
import torch
import trained_model
from safetensors.torch import save

import dlrm
from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import open_datasets
from dlrm.manifest import write_manifest
from dlrm.model.config import DLRMConfig
from dlrm.serving.loading import load_model
from dlrm.serving.predictor import Predictor
from dlrm.serving.scoring import probability
from dlrm.tasks.recommendation import Recommendation
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.state import Parameters


@pytest.fixture(scope="module")
def tested(trained):
    """The logits that `--mode test` computes for the test rows."""
    test = open_datasets(DataConfig(dataset=str(trained.dataset), test_batch_size=400)).test
    sizes = (8, (16, 8), (32, 1))
    names = ("embedding_dim", "bottom_mlp_sizes", "top_mlp_sizes")
    config = DLRMConfig(tuple(test.table_sizes), 3, **dict(zip(names, sizes, strict=True)))
    task = Recommendation(config)
    parameters = Parameters(task.model, task.table_parameters())
    Checkpoint.open(trained.checkpoint).load(parameters)
    with torch.no_grad():
        return torch.cat([task.predict(test.batch(i)) for i in range(len(test))]).numpy()


@pytest.fixture(scope="module")
def predictor(trained):
    return dlrm.load(trained.checkpoint)


def test_raw_lines_get_the_scores_of_testing(trained, predictor, tested, device):
    here = load_model(predictor.path, device)
    predictor = Predictor(here, predictor.transform, predictor.path)
    np.testing.assert_allclose(predictor.logits(trained.rows), tested, rtol=1e-5, atol=1e-5)
    probabilities = 1 / (1 + np.exp(-tested.astype(np.float64)))
    np.testing.assert_allclose(predictor.predict(trained.rows), probabilities, rtol=1e-5)


def test_rows_may_be_lines_fields_mappings_or_columns(trained, predictor, tested):
    lines = trained.rows[:50]
    fields = [line.split("\t") for line in lines]
    names = predictor.transform.names
    numbers = [[*(int(v) if v else None for v in row[:3]), *row[3:]] for row in fields]
    floats = [[*(float(v) if v else np.nan for v in row[:3]), *row[3:]] for row in fields]
    mappings = [dict(zip(names, row, strict=True)) for row in fields]
    columns = dict(zip(names, zip(*fields, strict=True), strict=True))
    as_bytes = [line.encode() for line in lines]
    for rows in (fields, numbers, floats, mappings, columns, as_bytes):
        np.testing.assert_allclose(predictor.logits(rows), tested[:50], rtol=1e-5, atol=1e-5)


def test_values_never_seen_score_as_missing_ones(predictor):
    assert predictor.logits([]).shape == (0,)
    assert predictor.logits(["1\t2\t3\tdeadbeef"]) == predictor.logits(["1\t2\t3"])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("1\t2", "a list of rows, got one string"),
        (["1\t2\t3", "1\tx"], "row 1, column numerical 1: expected an integer.* got 'x'"),
        ([["1", "2"]], "row 0: expected 7 fields, got 2"),
        ([{"numerical 0": 1}], "row 0: no column 'numerical 1'"),
        (["\t".join("1" * 8)], "row 0: expected 7 fields, got 8"),
        (["1\t2\t3"] * 30 + ["x"], "^row 30, column numerical 0: expected an integer"),
        (5, "expected a list of rows, got 5"),
        ([None], "row 0: expected a line, fields or a mapping, got None"),
        ({"numerical 0": "12"}, "rows: no column 'numerical 1'; expected numerical 0, "),
    ],
)
def test_bad_rows_are_named_whatever_the_batch(predictor, rows, message):
    small = Predictor(predictor.model, predictor.transform, predictor.path)
    small.batch_size = 7
    with pytest.raises(ValueError, match=message):
        small.predict(rows)


def test_the_dataset_of_another_model_is_refused(trained, other_trained):
    with pytest.raises(ValueError, match="its transform is not that of"):
        dlrm.load(trained.checkpoint, other_trained.dataset)


def test_what_is_no_checkpoint_is_refused(trained, tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint here"):
        dlrm.load(tmp_path)
    damaged = shutil.copytree(Checkpoint.open(trained.checkpoint).path, tmp_path / "damaged")
    with open(damaged / "tables" / "0.bin", "r+b") as file:
        file.write(b"\xff")
    with pytest.raises(ValueError, match=r"0\.bin: expected CRC-32"):
        dlrm.load(damaged)
    for tensors, problem in (
        (b"no tensors", r"dense\.safetensors: damaged, or no safetensors"),
        (save({"bottom_mlp.0.weight": torch.zeros(3)}), r"weight: expected a matrix, got \[3\]"),
    ):
        (damaged / "dense.safetensors").write_bytes(tensors)
        write_manifest(damaged, "checkpoint")
        with pytest.raises(ValueError, match=problem):
            dlrm.load(damaged)


def test_without_a_transform_raw_rows_are_refused(trained, tmp_path):
    dataset = shutil.copytree(trained.dataset, tmp_path / "dataset")
    shutil.rmtree(dataset / "transform")
    (dataset / "manifest.json").unlink()
    run = trained_model.train(dataset, tmp_path / "run", "--max_steps=2")
    with pytest.raises(ValueError, match="has no fitted transform"):
        dlrm.load(run).predict(["1\t2\t3"])
    assert dlrm.load(run, trained.dataset).predict(["1\t2\t3"]).shape == (1,)


def test_bytes_in_rows_and_every_kind_of_missing_value_count_as_in_lines(trained, predictor):
    line = next(line for line in trained.rows if line.count("\t\t") or line[0] == "\t")
    fields = line.split("\t")
    expected = predictor.logits([line])
    for missing in (None, "", b"", float("nan"), np.float32("nan"), pandas.NA, pandas.NaT):
        row = [field.encode() if field else missing for field in fields]
        assert predictor.logits([row]) == expected


def test_a_row_without_a_finite_score_is_named(trained, tmp_path):
    checkpoint, row = trained_model.overflowing(trained, tmp_path)
    model = dlrm.load(checkpoint)
    assert all(bool(weight.isfinite().all()) for weight in model.model.parameters())
    model.batch_size = 7
    rows = trained.rows
    named = f"^row {row}: expected a finite score, got (nan|-?inf): the model's weights"
    with pytest.raises(ValueError, match=named):
        model.predict(rows)
    assert np.isfinite(model.predict(rows[:row])).all()


def test_equal_logits_have_equal_probabilities():
    logits = np.full(1003, 2.837, np.float32)  # torch's sigmoid rounds the last of them otherwise
    (chance,) = np.unique(probability(logits))
    assert chance == pytest.approx(1 / (1 + math.exp(-2.837)), rel=1e-7)


@pytest.mark.slow
def test_a_model_that_is_replaced_again_and_again_is_always_loaded(trained, tmp_path):
    """Of 93 loads one failed, when a directory was replaced by two renames."""
    model = dlrm.load(trained.checkpoint)
    model.save(tmp_path / "model")
    expected = model.logits(rows := trained.rows[:20])
    over = threading.Event()

    def replace():
        while not over.is_set():
            model.save(tmp_path / "model", overwrite=True)

    replacing = threading.Thread(target=replace)
    replacing.start()
    try:
        for _ in range(300):
            np.testing.assert_array_equal(dlrm.load(tmp_path / "model").logits(rows), expected)
    finally:
        over.set()
        replacing.join()
