"""The training loop: exact step counts, reports, checkpoints and resuming."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from toy import Line, Points, trainer

from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.directory import CheckpointDirectory, best_record
from dlrm.train.config import TrainConfig
from dlrm.train.log import RunLog


def entries(path, kind="LOG"):
    lines = path.read_text().splitlines()
    assert all(line.startswith("DLLL {") for line in lines)
    return [e for e in (json.loads(line[5:]) for line in lines) if e["type"] == kind]


@pytest.mark.parametrize(
    ("config", "steps"), [({}, 10), ({"max_steps": 7}, 7), ({"epochs": 3}, 30)]
)
def test_a_run_takes_exactly_the_steps_asked_for(config, steps):
    run, data = trainer(**config), Points()
    run.fit(data, Points(2))
    assert run.progress.step == steps
    assert data.open == 0  # readers are closed, even mid-epoch


def test_steps_equal_a_plain_loop(device):
    run = trainer(Line(device=device), epochs=2)
    run.fit(Points(device=device), Points(2, device=device))
    task = Line(device=device)
    optimizer = torch.optim.Adam(task.model.parameters())
    step = 0
    for epoch in range(2):
        for batch in Points(device=device).batches(epoch):
            step += 1
            optimizer.param_groups[0]["lr"] = 0.01 * step
            optimizer.zero_grad()
            task.loss(batch).backward()
            optimizer.step()
    torch.testing.assert_close(run.task.weights(), task.weights())


def test_lines_come_after_every_print_freq_and_last_step(tmp_path, capsys):
    with RunLog(tmp_path / "log.json") as log:
        trainer(log=log, print_freq=4).fit(Points(), Points(2))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Epoch:")]
    assert [line.split("  ")[0] for line in lines] == [
        "Epoch:[0/1] [4/10]",
        "Epoch:[0/1] [8/10]",
        "Epoch:[0/1] [9/10]",
    ]
    assert lines[0].endswith("lr: 0.0500")  # index 4 is the fifth step
    assert " eta: 0:00:00  loss: " in lines[0]
    logged = [e for e in entries(tmp_path / "log.json") if "lr" in e["data"]]
    assert [e["step"] for e in logged] == [[0, 4], [0, 8], [0, 9]]
    assert set(logged[0]["data"]) == {"loss", "step_time", "lr"}


def test_the_printed_loss_is_the_mean_since_the_last_line(tmp_path, device):
    task, losses = Line(device=device), []
    original = task.loss

    def recording(batch):
        value = original(batch)
        if task.model.training:
            losses.append(value.item())
        return value

    task.loss = recording
    with RunLog(tmp_path / "log.json") as log:
        trainer(task, log, print_freq=4).fit(Points(device=device), Points(2, device=device))
    logged = [e["data"]["loss"] for e in entries(tmp_path / "log.json") if "lr" in e["data"]]
    expected = [sum(losses[:5]) / 5, sum(losses[5:9]) / 4, losses[9]]
    assert logged == pytest.approx(expected, rel=1e-6)


def test_nothing_waits_for_the_device_between_printed_lines(device):
    class Waits(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    counts = []
    for steps in (10, 50):
        config = {"print_freq": 1000, "test_after": 2, "kind": "sgd"}
        run = trainer(Line(device=device), schedule=lambda step: 0.01, **config)
        with Waits() as waits:
            run.fit(Points(steps, device=device), Points(2, device=device))
        counts.append(waits.count)
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("config", "evaluated"),
    [
        ({}, [10]),
        ({"epochs": 2}, [10, 20]),
        ({"test_freq": 4}, [4, 8, 10]),
        ({"epochs": 2, "test_freq": 5, "test_after": 1.0}, [10, 15, 20]),
        ({"max_steps": 6}, []),  # a benchmark of a few steps does not read the test set
        ({"max_steps": 6, "test_freq": 4}, [4, 6]),
    ],
)
def test_tests_come_every_test_freq_and_at_the_end(config, evaluated):
    run = trainer(**config)
    summary = run.fit(Points(), Points(2))
    history = [e["step"] for e in run.progress.history if "score" in e]
    assert history == evaluated
    assert ("best_score" in summary) == bool(evaluated)


def test_an_empty_test_set_is_never_tested(capsys):
    task = Line()
    summary = trainer(task, epochs=2).fit(Points(), Points(0))
    assert task.evaluations == []
    assert set(summary) == {"training_loss", "average_train_throughput"}
    assert "no test: none was asked for, or there is no test set" in capsys.readouterr().out


def test_the_best_weights_are_kept_and_judged_once_on_validation(tmp_path):
    task = Line(scores=[0.5, 0.9, 0.7, 0.66])
    checkpoints = CheckpointDirectory(tmp_path / "run")
    summary = trainer(task, checkpoints=checkpoints, epochs=3).fit(Points(), Points(2), Points(3))
    assert task.evaluations == [0.5, 0.9, 0.7, 0.66]  # the last is of validation
    assert (summary["best_score"], summary["best_epoch"]) == (0.9, 2.0)
    assert (summary["test_score"], summary["validation_score"]) == (0.9, 0.66)
    assert [p.name for p in sorted((tmp_path / "run").glob("step-*"))] == [
        "step-000000020",
        "step-000000030",
    ]
    assert checkpoints.best().name == "step-000000020"
    best = Line()
    trainer(best, epochs=2).fit(Points(), Points(2))
    assert all(map(torch.equal, task.weights(), best.weights()))  # the model has the best weights


@pytest.mark.parametrize(("metric", "epoch"), [("log_loss", 1), ("auc", 3), ("calibration", 2)])
def test_the_direction_of_a_metric_chooses_the_best(metric, epoch):
    task = Line(scores=[0.2, 0.9, 2.0])
    scored, task.metric, task.loss_metric = task.evaluate, metric, metric
    task.evaluate = lambda loader: {metric: scored(loader)["score"]}
    assert trainer(task, epochs=3).fit(Points(), Points(2))["best_epoch"] == epoch


def test_a_run_made_longer_keeps_its_best_checkpoint(tmp_path):
    scores = {5: 0.1, 10: 0.9, 12: 0.5, 15: 0.6, 20: 0.7}
    for steps in (10, 12, 15, 20):
        checkpoints = CheckpointDirectory(tmp_path / "run")
        task = Line()
        run = trainer(
            task, checkpoints=checkpoints, epochs=2, max_steps=steps, test_freq=5, checkpoint_freq=1
        )
        if last := checkpoints.last():
            run.resume(Checkpoint(last))
        progress = run.progress
        task.evaluate = lambda loader, p=progress: {"score": scores[p.step], "error": 1.0}
        summary = run.fit(Points(), Points(2))
        assert (summary["best_score"], summary["test_score"]) == (0.9, 0.9)
        assert checkpoints.best().name == "step-000000010"


def test_a_finished_run_resumed_without_a_further_test_reports_its_best(tmp_path, capsys):
    config = {"test_freq": 100, "checkpoint_freq": 5}  # step 10 is saved before its only test
    checkpoints = CheckpointDirectory(tmp_path / "run")
    trainer(Line(scores=[0.7]), checkpoints=checkpoints, **config).fit(Points(), Points(2))
    run = trainer(checkpoints=checkpoints, **config, test_after=2)
    run.resume(Checkpoint(checkpoints.last()))
    summary = run.fit(Points(), Points(2))
    assert (summary["best_score"], summary["test_score"]) == (0.7, 0.7)
    assert "all 10 steps are done already" in capsys.readouterr().out


def test_a_test_that_fails_loses_no_training(tmp_path):
    task = Line()

    def failing(loader):
        raise ValueError("bad test set")

    task.evaluate = failing
    checkpoints = CheckpointDirectory(tmp_path / "run")
    with pytest.raises(ValueError, match="bad test set"):
        trainer(task, checkpoints=checkpoints).fit(Points(), Points(2))
    assert checkpoints.last().name == "step-000000010"
    task = Line(scores=[0.7])
    run = trainer(task, checkpoints=checkpoints)
    run.resume(Checkpoint(checkpoints.last()))
    assert run.fit(Points(), Points(2))["best_score"] == 0.7  # the overdue test is run


def test_without_checkpoints_the_last_weights_are_judged():
    task = Line(scores=[0.9, 0.7, 0.6])
    summary = trainer(task, epochs=2).fit(Points(), Points(2), Points(3))
    assert (summary["best_score"], summary["test_score"]) == (0.9, 0.7)
    assert summary["validation_score"] == 0.6


def test_a_score_that_is_undefined_never_replaces_a_defined_one(tmp_path):
    task = Line(scores=[math.nan, 0.4, math.nan])
    summary = trainer(task, epochs=3).fit(Points(), Points(2))
    assert summary["best_score"] == 0.4


def test_the_threshold_stops_the_run_and_still_saves(tmp_path, capsys):
    task = Line(scores=[0.5, 0.81, 0.9])
    checkpoints = CheckpointDirectory(tmp_path / "run")
    run = trainer(task, checkpoints=checkpoints, epochs=5, auc_threshold=0.8)
    summary = run.fit(Points(), Points(2))
    assert run.progress.step == 20
    assert summary["best_score"] == 0.81
    assert checkpoints.last().name == "step-000000020"
    assert "score 0.810000 has reached --auc_threshold 0.8" in capsys.readouterr().out


def test_an_early_stop_ends_with_the_best_weights(tmp_path, capsys):
    task = Line(scores=[0.5, 0.7, 0.6, math.nan, 0.9])
    checkpoints = CheckpointDirectory(tmp_path / "run")
    run = trainer(task, checkpoints=checkpoints, epochs=9, early_stop=2)
    summary = run.fit(Points(), Points(2))
    assert run.progress.step == 40  # the tests after epochs 3 and 4 were no better
    assert (summary["best_score"], summary["best_epoch"]) == (0.7, 2)
    two_epochs = trainer(Line(), epochs=2)
    two_epochs.fit(Points(), Points(2))
    torch.testing.assert_close(run.task.weights(), two_epochs.task.weights(), rtol=0, atol=0)
    assert "no new best in 2 tests: --early_stop ends" in capsys.readouterr().out
    again = trainer(Line(scores=[0.9]), checkpoints=checkpoints, epochs=9, early_stop=2)
    again.resume(Checkpoint(checkpoints.last()))
    again.fit(Points(), Points(2))
    assert again.progress.step == 40


def test_a_plateau_lowers_the_rate_and_is_resumed(tmp_path):
    scores = [0.5, 0.4, 0.4, 0.6, 0.6, 0.6, 0.6]
    config = {"epochs": 7, "plateau_patience": 2, "plateau_factor": 0.25, "print_freq": 10}
    config |= {"schedule": lambda step: 0.01, "kind": "adam"}
    whole = trainer(Line(scores=list(scores)), **config)
    whole.fit(Points(), Points(2))
    assert whole.progress.drops == [30, 60]  # after the tests of epochs 2 and 3, and of 5 and 6
    rates = [whole.rate(step) for step in (1, 30, 31, 60, 61, 70)]
    assert rates == [0.01, 0.01, 0.0025, 0.0025, 0.000625, 0.000625]
    checkpoints = CheckpointDirectory(tmp_path / "run")
    first = trainer(Line(scores=scores[:5]), checkpoints=checkpoints, **config, max_steps=45)
    first.fit(Points(), Points(2))
    second = trainer(Line(scores=scores[4:]), checkpoints=checkpoints, **config)
    second.resume(Checkpoint(checkpoints.last()))
    second.checkpoints = None
    second.fit(Points(), Points(2))
    assert second.progress.drops == [30, 60]
    assert all(map(torch.equal, second.task.weights(), whole.task.weights()))


def test_a_nan_loss_stops_the_run_and_is_not_saved(tmp_path, device):
    task = Line(device=device)
    original, calls = task.loss, []

    def breaking(batch):
        calls.append(1)
        return original(batch) * (math.nan if len(calls) == 6 else 1)

    task.loss = breaking
    checkpoints = CheckpointDirectory(tmp_path / "run")
    run = trainer(task, checkpoints=checkpoints, print_freq=3, checkpoint_freq=2)
    with pytest.raises(
        FloatingPointError, match="became nan between steps 4 and 6.*step-000000004"
    ):
        run.fit(Points(device=device), Points(2, device=device))
    assert checkpoints.last().name == "step-000000004"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_finite_weights_are_saved_though_their_sum_overflows(tmp_path, dtype, device):
    task = Line(device=device)
    big = torch.full((4, 20_000), torch.finfo(dtype).max, dtype=dtype, device=device)
    task.model.register_buffer("big", big)
    checkpoints = CheckpointDirectory(tmp_path / "run")
    run = trainer(task, checkpoints=checkpoints, checkpoint_freq=2, max_steps=4)
    run.fit(Points(device=device), Points(2, device=device))
    assert checkpoints.last().name == "step-000000004"
    for value, text in ((-math.inf, "inf"), (math.nan, "nan")):
        big[3, 19_999] = value
        with pytest.raises(FloatingPointError, match=f"largest value of big became {text}"):
            run._save()


def refuse_constant(name):
    raise ValueError(f"{name} is no JSON")


def test_an_undefined_metric_is_null_in_files_and_resumed(tmp_path, capsys):
    checkpoints = CheckpointDirectory(tmp_path / "run")
    config = {"epochs": 2, "print_freq": 10}
    with RunLog(tmp_path / "run.log") as log:
        first = trainer(
            Line(scores=[math.nan]), checkpoints=checkpoints, log=log, **config, max_steps=10
        )
        first.fit(Points(), Points(2))
    assert "note: score is undefined, the test set has one class only" in capsys.readouterr().out
    files = [*(tmp_path / "run").rglob("*.json")]
    assert {"progress.json", "best.json"} <= {file.name for file in files}
    for text in (*map(Path.read_text, files), (tmp_path / "run.log").read_text()):
        for document in text.split("DLLL ") if text.startswith("DLLL") else [text]:
            json.loads(document or "{}", parse_constant=refuse_constant)
    assert math.isnan(best_record(tmp_path / "run")["score"])
    assert "| score | undefined |" in (checkpoints.last() / "MODEL.md").read_text()
    task = Line(scores=[0.5, math.nan])
    second = trainer(task, checkpoints=checkpoints, **config)
    second.resume(Checkpoint(checkpoints.last()))
    assert math.isnan(second.progress.best["score"])
    second.fit(Points(), Points(2), Points(2))
    assert second.progress.best["score"] == 0.5
    expected = "note: score is undefined, the validation set has one class only\n"
    assert expected in capsys.readouterr().out


def test_the_throughput_counts_all_steps_after_the_warmup(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("dlrm.train.progress.time.perf_counter", lambda: now[0])
    task = Line()
    original, seconds = task.loss, iter([100.0, 100.0, 1.0, 2.0, 3.0, 4.0])

    def slow(batch):
        if task.model.training:
            now[0] += next(seconds)
        return original(batch)

    task.loss = slow
    summary = trainer(task, max_steps=6, benchmark_warmup_steps=2).fit(Points(), Points(2))
    assert summary["average_train_throughput"] == pytest.approx(4 * 4 / (1 + 2 + 3 + 4))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"epochs": 0}, "--epochs 0"),
        ({"max_steps": 0}, "--max_steps 0"),
        ({"print_freq": 0}, "--print_freq 0"),
        ({"test_freq": -1}, "--test_freq -1"),
        ({"test_after": -0.5}, "--test_after -0.5"),
        ({"auc_threshold": 1.5}, "--auc_threshold 1.5"),
        ({"plateau_patience": 0}, "--plateau_patience 0"),
        ({"plateau_factor": 1.0}, "--plateau_factor 1.0"),
        ({"early_stop": 0}, "--early_stop 0"),
        ({"benchmark_warmup_steps": -1}, "--benchmark_warmup_steps -1"),
    ],
)
def test_impossible_runs_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**config)


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_accumulation_equals_one_batch(parts, device):
    def weights(**config):
        task = Line(dropout=0, device=device)
        task.model.double()
        task.loss = lambda batch: Line.loss(task, [tensor.double() for tensor in batch])
        run = trainer(task, kind="sgd", schedule=lambda step: 0.1, **config)
        run.fit(Points(device=device), Points(2, device=device))
        return task.weights(), [e["loss"] for e in run.progress.history if "loss" in e]

    expected, losses = weights()
    actual, accumulated = weights(gradient_accumulation_steps=parts)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)
    assert accumulated == pytest.approx(losses, rel=1e-6)
