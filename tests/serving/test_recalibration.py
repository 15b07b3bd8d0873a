"""Recalibration: fits, with scikit-learn as the oracle, and every place that scores applies it."""

import json
import math
import sys

import numpy as np
import pytest
import torch

import dlrm
from dlrm.serving.network.exportable import Exportable
from dlrm.serving.network.platforms import PLATFORMS
from dlrm.serving.network.quantize import quantize_tables
from dlrm.serving.network.recalibration import (
    FittedRows,
    Recalibration,
    check_fitting,
    fit,
    load_recalibration,
    of_sampling_rate,
    write_recalibrated,
)
from dlrm.serving.rows.raw import inputs_of_text, text_of_lines
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.reports.model_card import MODEL_CARD


def rows(count=20_000, seed=0):
    """Returns overconfident, shifted logits, labels, and the true logits."""
    random = np.random.default_rng(seed)
    true = random.normal(-1.5, 1.2, count)
    labels = (random.random(count) < 1 / (1 + np.exp(-true))).astype(np.float32)
    return (1.7 * true + 0.8).astype(np.float32), labels, true


@pytest.mark.parametrize("weighted", [False, True])
def test_platt_is_a_logistic_regression(weighted):
    logits, labels, true = rows()
    weights = np.random.default_rng(1).integers(0, 3, len(labels)) / 2 if weighted else None
    mapped = fit(logits, labels, weights).of(logits).astype(np.float64)
    slope, level = np.polyfit(logits, mapped, 1)
    np.testing.assert_allclose(mapped, slope * logits + level, atol=1e-5)
    # The likelihood has its only maximum where both of its derivatives are zero.
    missed = (1.0 if weights is None else weights) * (labels - 1 / (1 + np.exp(-mapped)))
    assert abs(missed.sum()) < 1e-6 * len(labels)
    assert abs(missed @ logits.astype(np.float64)) < 1e-6 * len(labels)
    assert np.abs(mapped - true).max() < 0.4


def test_the_sampling_rate_corrects_the_odds():
    chances = np.array([0.1, 0.5, 0.9])
    logits = np.log(chances / (1 - chances))
    found = 1 / (1 + np.exp(-of_sampling_rate(0.2).of(logits)))
    expected = chances / (chances + (1 - chances) / 0.2)  # He et al., 2014
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"--sampling_rate 1.5: expected a share in \(0, 1\]"):
        of_sampling_rate(1.5)


def test_a_stored_recalibration_is_applied_wherever_rows_are_scored(trained, tmp_path):
    lines = trained.rows
    plain = dlrm.load(trained.checkpoint)
    before = plain.logits(lines)
    labels = np.array([line[0] == "1" for line in trained.lines])
    for found in (fit(before, labels), of_sampling_rate(0.1)):
        target = tmp_path / found.kind
        write_recalibrated(Checkpoint.open(trained.checkpoint).path, found, target)
        assert f"Scores are recalibrated ({found.kind}: " in (target / MODEL_CARD).read_text()
        assert "Recal" not in (Checkpoint.open(trained.checkpoint).path / MODEL_CARD).read_text()
        loaded = dlrm.load(target)
        np.testing.assert_allclose(loaded.logits(lines), found.of(before), rtol=1e-5, atol=1e-5)
        exported = Exportable(
            loaded.model, quantize_tables(loaded.model, "fp32"), recalibration=loaded.recalibration
        )
        text = text_of_lines("\n".join(lines[:50]).encode(), len(loaded.row_transform.names))
        part = inputs_of_text(loaded.row_transform, text)
        tensors = torch.from_numpy(part.numerical).float(), torch.from_numpy(part.ids).long()
        for platform in (PLATFORMS["onnx"], PLATFORMS["ts-script"]):
            platform.write(exported.eval(), tensors, target)
            score = platform.open(target)
            served = score(*(tensor.numpy() for tensor in tensors))
            np.testing.assert_allclose(served[:, 0], loaded.logits(lines[:50]), atol=1e-5)
    assert load_recalibration(Checkpoint.open(trained.checkpoint).path) is None
    np.testing.assert_array_equal(dlrm.load(trained.checkpoint).logits(lines), before)


def test_a_recalibration_stores_the_rows_that_it_was_fitted_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = of_sampling_rate(0.1)
    older = found.to_json()
    assert "fitted_to" not in older
    assert Recalibration.from_json(older).fitted_to is None
    found.fitted_to = FittedRows.from_sources(["day_7", "-"], None)
    stored = json.loads(json.dumps(found.to_json()))
    assert {**older, "fitted_to": {"sources": [f"{tmp_path}/day_7", "-"], "split": None}} == stored
    again = Recalibration.from_json(stored).fitted_to
    assert again == found.fitted_to
    with pytest.raises(TypeError):
        Recalibration.from_json({**older, "fitted_to": 5})
    (tmp_path / "link").symlink_to("day_7")
    assert again.overlap(FittedRows.from_sources(["day_6", "link"], None))
    for sources, split in ((["day_6"], None), (["-"], None), (["day_7"], "test")):
        assert not again.overlap(FittedRows.from_sources(sources, split))


def test_a_missing_scikit_learn_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ValueError, match=r"--recalibrate: .*pip install 'scikit-learn>="):
        check_fitting()


def test_what_cannot_be_fitted_is_named(tmp_path):
    logits, labels, _ = rows(100)
    with pytest.raises(ValueError, match="--recalibrate: expected rows of both classes"):
        fit(logits, np.zeros(100))
    for wrong in (-logits, np.zeros(100), 10 * labels, -10 * labels):
        with pytest.raises(ValueError, match="--recalibrate: expected scores that rise"):
            fit(wrong, labels)
    (tmp_path / "recalibration").mkdir()
    file = tmp_path / "recalibration" / "recalibration.json"
    file.write_text('{"kind": "platt", "value": 1, "slope": 0, "center": 0}')
    with pytest.raises(ValueError, match="recalibration.json: not a recalibration"):
        load_recalibration(tmp_path)
    with pytest.raises(ValueError, match="expected an increasing line"):
        Recalibration("platt", math.nan)
