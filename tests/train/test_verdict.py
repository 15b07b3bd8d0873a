"""The report on where step time goes and what bounds it leaves the run unchanged."""

import json
import time

import pytest
import torch
from toy import Line, Points, trainer

from dlrm.step_clock import PARTS
from dlrm.train.log import RunLog
from dlrm.train.reports.console import bound_by, verdict


@pytest.fixture
def clock(monkeypatch):
    """Time passes while something sleeps, and never else."""
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)


def shares(**given):
    return dict.fromkeys(PARTS, 0.0) | given


class SlowPoints(Points):
    """Points that are slow to read."""

    def batches(self, epoch=0, start=0):
        for batch in super().batches(epoch, start):
            time.sleep(0.02)
            yield batch


class Computing(Line):
    """A line whose products take time."""

    def loss(self, batch):
        time.sleep(0.02)
        return super().loss(batch)


def logged(tmp_path, task, data):
    with RunLog(tmp_path / "log.json") as log:
        trainer(task, log, print_freq=4).fit(data, Points(30))
    lines = (json.loads(line[5:]) for line in (tmp_path / "log.json").read_text().splitlines())
    found = [line for line in lines if line["type"] == "LOG" and "share_data" in line["data"]]
    assert [line["step"] for line in found] == [[0, 4], [0, 8], [0, 9]]
    return [line["data"] for line in found]


@pytest.mark.usefixtures("clock")
def test_waits_are_found_and_named(tmp_path, capsys):
    found = logged(tmp_path, Line(), SlowPoints())
    for one in found:
        assert sum(one.values()) == pytest.approx(1)
        assert one["share_data"] > 0.5
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("time: ")]
    assert len(lines) == 3
    assert all(line.startswith("time: data ") and ": input-bound" in line for line in lines)


@pytest.mark.usefixtures("clock")
def test_steps_without_waits_are_compute_bound(tmp_path, capsys):
    logged(tmp_path, Computing(), Points())
    assert ": compute-bound" in capsys.readouterr().out


@pytest.mark.usefixtures("clock")
def test_steps_that_take_no_time_have_no_verdict(capsys):
    trainer(Line(), print_freq=4).fit(Points(), Points(2))
    out = capsys.readouterr().out
    assert out.count("Epoch:[") == 3
    assert "\ntime: " not in out


def test_parts_of_a_device_add_up(tmp_path, device, capsys):
    with RunLog(tmp_path / "log.json") as log:
        run = trainer(Line(device=device), log, print_freq=4)
        run.fit(Points(device=device), Points(2, device=device))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("time: ")]
    assert len(lines) == 3
    assert "products" in lines[0]


def test_nothing_is_reported_where_it_is_not_wanted_and_nothing_else_changes(tmp_path, capsys):
    results = []
    for wanted in (True, False):
        run = trainer(Line(), print_freq=4, verdict=wanted)
        run.fit(Points(), Points(2))
        results.append(run.task.weights())
        assert ("\ntime: " in capsys.readouterr().out) == wanted
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_the_longest_wait_of_a_quarter_of_a_step_bounds_it():
    assert bound_by(shares(products=0.5, data=0.15, exchange=0.35)) == (
        "communication-bound",
        "exchange",
    )
    assert bound_by(shares(products=0.3, update=0.4, data=0.24)) == ("compute-bound", "update")
    line = verdict(shares(products=0.74, data=0.26), {"data": "a flag", "products": "none"})
    assert line == "products 74%, data 26%: input-bound; try a flag"


@pytest.mark.usefixtures("clock")
def test_advice_is_printed_once(capsys):
    run = trainer(Line(), print_freq=4)
    run.advice = {"data": "a faster disk"}
    run.fit(SlowPoints(), Points(2))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("time: ")]
    advised = ["; try a faster disk" in line for line in lines]
    assert advised == [True, False, False]
