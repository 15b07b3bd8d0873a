"""Recalibration: fits, with scikit-learn as the oracle, and every place that scores applies it."""

import json
import math
import sys

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from sklearn.isotonic import IsotonicRegression

import dlrm
from dlrm.serving.network.exportable import ExportableDLRM
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
from dlrm.serving.rows.config import RECALIBRATIONS
from dlrm.serving.rows.raw import inputs_of_text, text_of_lines
from dlrm.train.checkpoints.directory import find_checkpoint
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
    mapped = fit("platt", logits, labels, weights).of(logits).astype(np.float64)
    slope, level = np.polyfit(logits, mapped, 1)
    np.testing.assert_allclose(mapped, slope * logits + level, atol=1e-5)
    # The likelihood has its only maximum where both of its derivatives are zero.
    missed = (1.0 if weights is None else weights) * (labels - 1 / (1 + np.exp(-mapped)))
    assert abs(missed.sum()) < 1e-6 * len(labels)
    assert abs(missed @ logits.astype(np.float64)) < 1e-6 * len(labels)
    assert np.abs(mapped - true).max() < 0.4


@pytest.mark.parametrize("weighted", [False, True])
def test_a_temperature_is_the_likeliest_factor_of_the_logits(weighted):
    logits, labels, _ = rows(2000)
    weights = np.random.default_rng(1).integers(0, 3, 2000) / 2 if weighted else None
    x, y = logits.astype(np.float64), labels.astype(np.float64)
    w = np.ones(2000) if weights is None else weights

    def loss(factor):
        return w @ (np.logaddexp(0, factor * x) - y * factor * x)

    best = minimize_scalar(loss, bounds=(0.01, 10), method="bounded", options={"xatol": 1e-9}).x
    mapped = fit("temperature", logits, labels, weights).of(logits)
    np.testing.assert_allclose(mapped, best * x, rtol=1e-5, atol=1e-6)


def isotonic_rates(labels, weights):
    """Computes isotonic regression by its min-max formula (Robertson et al., 1988)."""
    count = len(labels)
    rates = np.empty(count)
    for row in range(count):
        rates[row] = max(
            min(np.average(labels[i:j], weights=weights[i:j]) for j in range(row + 1, count + 1))
            for i in range(row + 1)
        )
    return rates


@pytest.mark.parametrize("weighted", [False, True])
def test_isotonic_joins_the_steps_of_an_isotonic_regression(weighted):
    logits, labels, _ = rows(60)
    weights = np.random.default_rng(1).integers(1, 4, 60).astype(float) if weighted else None
    found = fit("isotonic", logits, labels, weights).to_json()
    weight = np.ones(60) if weights is None else weights
    order = np.argsort(logits)
    x, y, w = logits[order].astype(float), labels[order], weight[order]
    rates = isotonic_rates(y, w)
    steps = [np.isclose(rates, rate) for rate in np.unique(rates.round(9))]
    odds = [((w * y)[s].sum() + 0.5) / ((w * (1 - y))[s].sum() + 0.5) for s in steps]
    knots = [np.average(x[s], weights=w[s]) for s in steps]
    rises = [i for i in range(len(odds)) if odds[i] > max(odds[:i], default=0)]
    np.testing.assert_allclose(found["knots"], np.array(knots)[rises], rtol=1e-9)
    np.testing.assert_allclose(found["values"], np.log(odds)[rises], rtol=1e-9)


def test_isotonic_is_near_that_of_all_rows_and_changes_no_ranking():
    logits, labels, true = rows()
    found = fit("isotonic", logits, labels)
    mapped = found.of(logits)
    oracle = IsotonicRegression(out_of_bounds="clip").fit_transform(logits, labels)
    chances = 1 / (1 + np.exp(-mapped.astype(float)))
    # Ours pools rows in bins first and joins the steps by lines.
    assert np.abs(chances - oracle).mean() < 0.01
    assert np.abs(chances - 1 / (1 + np.exp(-true))).mean() < 0.02
    ascending = np.linspace(-20, 20, 4001, dtype=np.float32)
    assert (np.diff(found.of(ascending)) > 0).all()
    again = Recalibration.from_json(found.to_json())
    np.testing.assert_array_equal(again.of(logits), mapped)
    knots = found.to_json()
    inside = (ascending > knots["knots"][0]) & (ascending < knots["knots"][-1])
    expected = np.interp(ascending[inside], knots["knots"], knots["values"])
    np.testing.assert_allclose(found.of(ascending[inside]), expected, atol=1e-4)


@pytest.mark.parametrize("kind", RECALIBRATIONS)
def test_weights_are_repeated_rows(kind):
    logits, labels, _ = rows(300)  # few enough that each repetition has its bin
    weights = np.random.default_rng(1).integers(0, 3, 300)
    found = fit(kind, logits, labels, weights)
    repeated = fit(kind, np.repeat(logits, weights), np.repeat(labels, weights))
    np.testing.assert_allclose(found.of(logits), repeated.of(logits), atol=1e-5)


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
    for found in (fit("isotonic", before, labels), of_sampling_rate(0.1)):
        target = tmp_path / found.kind
        write_recalibrated(find_checkpoint(trained.checkpoint), found, target)
        assert f"Scores are recalibrated ({found.kind}: " in (target / MODEL_CARD).read_text()
        assert "Recal" not in (find_checkpoint(trained.checkpoint) / MODEL_CARD).read_text()
        loaded = dlrm.load(target)
        np.testing.assert_allclose(loaded.logits(lines), found.of(before), rtol=1e-5, atol=1e-5)
        exported = ExportableDLRM(
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
    assert load_recalibration(find_checkpoint(trained.checkpoint)) is None
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
    with pytest.raises(ValueError, match="--recalibrate isotonic: expected rows of both classes"):
        fit("isotonic", logits, np.zeros(100))
    for wrong in (-logits, np.zeros(100), 10 * labels, -10 * labels):
        with pytest.raises(ValueError, match="--recalibrate platt: expected scores that rise"):
            fit("platt", wrong, labels)
    for wrong in (-logits, np.zeros(100), 2 * labels - 1, 1 - 2 * labels):
        with pytest.raises(ValueError, match="--recalibrate temperature: expected scores that"):
            fit("temperature", wrong, labels)
    (tmp_path / "recalibration").mkdir()
    file = tmp_path / "recalibration" / "recalibration.json"
    file.write_text('{"kind": "platt", "knots": [1, 0], "values": [0, 1]}')
    with pytest.raises(ValueError, match="recalibration.json: not a recalibration"):
        load_recalibration(tmp_path)
    with pytest.raises(ValueError, match="expected knots, values and slopes of an increasing map"):
        Recalibration("platt", np.zeros(1), np.array([math.nan]))
