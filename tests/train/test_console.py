"""Two forms of a run's terminal: lines like NVIDIA's, which programs read, and the short form."""

import json
import re
import time
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from toy import Line, Points, trainer

from dlrm.step_clock import PARTS
from dlrm.train.log import RunLog
from dlrm.train.reports.console import Console, Saved

NVIDIA = """\
Epoch:[0/3] [4/10]  eta: #  loss: #  step_time: #  lr: #
time: #
Epoch:[0/3] [8/10]  eta: #  loss: #  step_time: #  lr: #
time: #
Epoch 0 step 9. test: score 0.500000  error #  (# s)
Epoch:[1/3] [2/10]  eta: #  loss: #  step_time: #  lr: #
time: #
Epoch:[1/3] [6/10]  eta: #  loss: #  step_time: #  lr: #
time: #
Epoch 1 step 9. test: score 0.700000  error #  (# s)
Epoch:[2/3] [0/10]  eta: #  loss: #  step_time: #  lr: #
time: #
Epoch:[2/3] [4/10]  eta: #  loss: #  step_time: #  lr: #
time: #
Epoch:[2/3] [8/10]  eta: #  loss: #  step_time: #  lr: #
time: #
Epoch:[2/3] [9/10]  eta: #  loss: #  step_time: #  lr: #
time: #
Epoch 2 step 9. test: score 0.600000  error #  (# s)
Final weights (last, step 30). test: score 0.600000  error #
Final weights (last, step 30). validation, hold-out: score #  error #
curves: /run/curves.png
the weights are not saved; --save_checkpoint_path saves them
DLL # - () training_loss : #
DLL # - () average_train_throughput : # samples/s
DLL # - () average_test_throughput : # samples/s
DLL # - () best_score : 0.7
DLL # - () best_epoch : 2.0
DLL # - () best_validation_loss : #
DLL # - () test_score : 0.6
DLL # - () test_error : #
DLL # - () validation_score : #
DLL # - () validation_error : #
"""
SHORT = """\
test        step 10/30  score 0.5000  error #  best
test        step 20/30  score 0.7000  error #  best
test        step 30/30  score 0.6000  error #

test        score 0.6000  error #
validation  score #  error #  hold-out
speed       # samples/s, training loss #
time        #
saved       no weights; --save_checkpoint_path saves them
curves      /run/curves.png
next        dlrm evaluate
            dlrm predict
"""


class Terminal(StringIO):
    def isatty(self):
        return True


@pytest.fixture
def on_terminal(monkeypatch):
    """Returns a function that returns what an act shows on a terminal of 80 columns."""
    for name, value in {"COLUMNS": "80", "LINES": "24", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)

    def shown(act):
        terminal = Terminal()
        with redirect_stdout(terminal), redirect_stderr(terminal):
            act()
        return terminal.getvalue()

    return shown


def trained(path, **form):
    """Trains a line and returns its weights and the entries of its log, without times."""
    with RunLog(path, **form) as log:
        run = trainer(Line(scores=[0.5, 0.7, 0.6]), log, print_freq=4, epochs=3)
        summary = run.fit(Points(), Points(2), Points(3))
        log.console.saved(Saved(Path("/run/curves.png"), None, None, None))
        log.console.suggest(["dlrm evaluate", "dlrm predict"])
        log.summary(summary)
    entries = [json.loads(line[5:]) for line in path.read_text().splitlines()]
    timed = re.compile("throughput|step_time|share_")
    for entry in entries:
        entry["data"] = {k: v for k, v in entry.get("data", {}).items() if not timed.search(k)}
    own = ("type", "step", "data", "metric")
    return run.task.weights(), [{name: entry.get(name) for name in own} for entry in entries]


def assert_like(text, expected):
    """Compares lines; a number sign stands for what differs between runs and machines."""
    for line, like in zip(text.splitlines(), expected.splitlines(), strict=True):
        pattern = re.escape(like).replace(r"\#", r"\S.*?")
        assert re.fullmatch(pattern, line), (line, like)


def test_the_form_of_nvidia_stays(tmp_path, capsys):
    trained(tmp_path / "log.json")
    assert_like(capsys.readouterr().out, NVIDIA)


def test_the_short_form_has_a_line_for_each_test_and_a_closing_block(tmp_path, capsys):
    trained(tmp_path / "log.json", log_format="short")
    assert_like(capsys.readouterr().out, SHORT)


def test_verbose_adds_progress_and_time_at_each_point(tmp_path, capsys):
    trained(tmp_path / "log.json", log_format="short", verbose=True)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("time: ") for line in lines) == 8
    progress = [line for line in lines if line.startswith("train ")]
    assert_like(progress[0], "train       step  5/30  loss #  # samples/s  lr 0.05  ETA #")
    assert len(progress) == 8


def test_forms_change_neither_the_weights_nor_the_log(tmp_path):
    forms = [{}, {"log_format": "short"}, {"log_format": "short", "verbose": True}]
    first, *others = (trained(tmp_path / f"{n}.json", **form) for n, form in enumerate(forms))
    for weights, entries in others:
        torch.testing.assert_close(weights, first[0], rtol=0, atol=0)
        assert entries == first[1]


def test_lines_of_progress_without_a_terminal_are_few(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    console = Console("short")
    console.start(1000, 0, 1, 1000)

    def printed(step, seconds):
        now[0] = seconds
        console.point(step, 0.5, 0.1, 128.0, 0.01)
        return capsys.readouterr().out

    assert printed(100, 29) == ""
    line = "train       step   110/1,000  loss 0.5000  1,280 samples/s  lr 0.01  ETA 0:01:29\n"
    assert printed(110, 31) == line
    assert printed(200, 100) == ""  # not a tenth of the steps since
    assert printed(210, 101)
    assert printed(211, 700) == ""
    assert printed(212, 702)  # ten minutes
    assert printed(1000, 2000) == ""  # the closing block follows


def test_a_long_line_of_settings_is_abridged(on_terminal, capsys):
    def act():
        Console("short").line("all", "recipe: " + "; ".join(["lr=0.004"] * 50))

    first, second = on_terminal(act).splitlines()
    assert second.startswith(" " * 12 + "lr=0.004; ")
    assert second.endswith("; ...")
    assert max(len(second), len(first)) <= 80 + len("\x1b[1m\x1b[0m")
    act()  # in a file it is one line
    assert re.fullmatch(r"recipe {6}lr=0\.004; .*; \.\.\.\n", capsys.readouterr().out)


def test_the_short_form_has_the_time_of_the_whole_run_once(capsys):
    console, advice = Console("short"), {"data": "a faster disk"}
    parts = dict.fromkeys(PARTS, 0.0)
    console.time(parts | {"data": 1.0}, 1.0, advice)
    console.time(parts | {"products": 1.0}, 3.0, advice)
    assert capsys.readouterr().out == ""
    console.saved(Saved(Path("/run/curves.png"), None, None, None))
    console.summary({})
    line = "time        products 75%, data 25%: input-bound; try a faster disk\n"
    assert line in capsys.readouterr().out


@pytest.mark.parametrize("end", [{"auc_threshold": 0.3}, {"early_stop": 1}])
def test_a_run_that_ends_before_the_first_printed_loss_has_a_closing_block(capsys, end):
    with RunLog(log_format="short") as log:
        run = trainer(Line(scores=[0.4, 0.3]), log, epochs=3, verdict=False, **end)
        log.summary(run.fit(Points(), Points(2)))
    closing = "test        score #  error #\nspeed       # samples/s"
    assert run.progress.step < 30
    assert_like(capsys.readouterr().out.split("\n\n")[1], closing)


def test_other_ranks_print_nothing(capsys):
    with RunLog(quiet=True, log_format="short") as log:
        trainer(Line(), log, print_freq=4).fit(Points(), Points(2))
        log.summary({"training_loss": 0.5, "selection_split": "test"})
    assert capsys.readouterr() == ("", "")


def test_the_bar_on_a_terminal_has_loss_throughput_and_time_left(on_terminal):
    def show_progress():
        console = Console("short")
        console.start(1000, 0, 1, 1000)
        console.point(100, 0.5, 0.1, 128.0, 0.01)
        console.line("a line")
        console.end()

    shown = on_terminal(show_progress)
    before, _, after = shown.partition("\ra line\n")
    assert not before.split("\r")[-1].strip()  # the bar is cleared first
    assert re.search(
        r"^\rtrain +0%\|.*\| 0/1,000 steps, loss 0\.5000, 1,280 samples/s, ETA \?", after
    )
    assert all(len(line) <= 80 for line in re.split("[\r\n]", shown))


@pytest.mark.parametrize("shown", [True, False])
def test_a_quiet_run_may_have_a_bar_with_its_figures(capsys, shown):
    with RunLog(quiet=True, progress=shown) as log:
        trainer(Line(scores=[0.5]), log, print_freq=4).fit(Points(), Points(2))
    out, bar = capsys.readouterr()
    last = bar.split("\r")[-1]
    assert out == ""
    assert bool(re.search(r"10/10 steps, loss \d\.\d+, .*samples/s", last)) == shown
    assert ("score 0.5000" in last) == shown


def show_all():
    console = Console("short", progress=False)
    console.start(2, 0, 1, 2)
    console.line("note: " + "word " * 20)
    metrics = {"auc": 0.5, "log_loss": 1.0, "calibration": 1.0}
    console.test(1, "test", metrics, 1.0, is_best=True)
    console.saved(Saved(Path("/run/curves.png"), None, Path("/run/step-2"), Path("/run/step-1")))
    console.suggest(["dlrm predict --checkpoint run --input a_dataset --output scores_of_it.npy"])
    console.summary({})


def test_a_terminal_has_colors_and_lines_that_end_between_words(on_terminal):
    bold, end = "\x1b[1m", "\x1b[0m"
    assert on_terminal(show_all).splitlines() == [
        f"\x1b[33mnote:{end} " + "word " * 14 + "word",
        "  word word word word word",
        f"{bold}test{end}        step 1/2  AUC 0.5000  log loss 1.0000  calibration 1.0000  "
        f"\x1b[32mbest{end}",
        "",
        f"{bold}saved{end}       /run/step-1 (best), step-2 (last)",
        f"{bold}curves{end}      /run/curves.png",
        f"{bold}next{end}        dlrm predict --checkpoint run --input a_dataset --output \\",
        "            scores_of_it.npy",
    ]


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colors_can_be_refused(on_terminal, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert "\x1b" not in on_terminal(show_all)
