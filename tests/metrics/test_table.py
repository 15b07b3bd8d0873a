"""The table of metrics names what is computed, and says which values are better."""

import json
import math

import numpy as np
import pytest
import torch

from dlrm.language import task as language
from dlrm.metrics.clicks import click_metrics
from dlrm.metrics.judged import ScoredRows, judge
from dlrm.metrics.latency import Latency
from dlrm.metrics.table import (
    EVALUATE,
    METRICS,
    SHOWN,
    TESTED,
    TESTS,
    cost,
    metric_of,
    metrics_note,
)
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.runs import read_run
from dlrm.vision import task as images

LABELS = np.tile([0.0, 1.0, 0.0], 20)


def metrics_of(logits):
    rows = ScoredRows((logits,), LABELS, groups=np.arange(60) // 6)
    return {name: one.value for name, one in judge(rows, 0).models[0].items()}


def test_the_table_names_what_evaluations_and_tests_report():
    names = {name for name, metric in METRICS.items() if metric.of in (TESTS, EVALUATE)}
    assert metrics_of(LABELS).keys() == names
    assert [*click_metrics(torch.from_numpy(LABELS), torch.from_numpy(LABELS))] == TESTED
    assert [*click_metrics(torch.empty(0), torch.empty(0))] == TESTED
    assert set(SHOWN) <= set(TESTED)


def test_better_scores_cost_less_in_every_metric():
    good, bad = metrics_of(6 * LABELS - 3), metrics_of(3 - 6 * LABELS)
    for name, value in good.items():
        metric = METRICS[name]
        assert metric.cost(value) < metric.cost(bad[name]), name
        assert max(value, bad[name]) <= metric.greatest, name


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("auc", "auc"),
        ("set_aside_pr_auc", "pr_auc"),
        ("best_validation_loss", "loss"),
        ("test_log_loss", "log_loss"),
        ("lift@5%", "lift@5%"),
        ("average_train_throughput", "throughput"),
    ],
)
def test_keys_of_a_log_are_of_a_metric(key, name):
    assert metric_of(key) is METRICS[name]


def test_other_keys_are_of_none():
    assert metric_of("best_epoch") is None
    assert metric_of("closs") is None
    assert cost("score", 2) < cost("score", 1)  # the higher is better


def test_a_click_model_reports_metrics_of_the_table(trained):
    """Without a row, the choice of weights would take the default direction."""
    lines = (trained.checkpoint.parent / "log.json").read_text().splitlines()
    data = [json.loads(line.removeprefix("DLLL ")).get("data") for line in lines[1:]]
    names = {name for values in data if values for name in values}
    names |= read_run(Checkpoint.open(trained.checkpoint).path).metrics.keys()
    assert {"step_time", "test_calibration", "best_auc", "average_test_throughput"} <= names
    settings = {"lr", "best_epoch"} | {name for name in names if name.startswith("share_")}
    assert not [name for name in sorted(names - settings) if metric_of(name) is None]


@pytest.mark.parametrize("end", ["", "_batch_64", "_batch_64_onnx"])
def test_speed_has_a_direction_and_a_unit(end):
    assert metric_of(f"mean_inference_throughput{end}").unit == "samples/s"
    for name in Latency._fields:
        key = f"{name}_inference_latency{end}"
        assert metric_of(key).unit == "s"
        assert cost(key, 2) > cost(key, 1)


def test_what_costs_least_is_right():
    calibration = METRICS["calibration"]
    assert sorted([1.3, 0.9, 1.0, 0.2], key=calibration.cost) == [1.0, 0.9, 1.3, 0.2]
    assert math.isnan(METRICS["auc"].cost(math.nan))


def test_a_test_explains_the_lesser_known_metrics_once():
    note = metrics_note(["test_calibration", "best_calibration", "test_auc", "training_loss"])
    assert note == "calibration: predicted over observed clicks, 1 is right"
    assert metrics_note(["auc", "log_loss"]) is None


def test_networks_choose_by_metrics_of_the_table():
    tasks = (
        images.ImageClassification,
        language.PreTraining,
        language.QuestionAnswering,
        language.SequenceClassification,
    )
    assert {task.metric for task in tasks} | {"loss"} <= METRICS.keys()
