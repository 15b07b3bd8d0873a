"""`dlrm daily`: which days it learns, what it refuses, and a chain of real steps that is killed."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import daily_steps
import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score
from test_documented_commands import MODEL

from dlrm.locks import lock
from dlrm.scripts.commands import COMMANDS, run
from dlrm.scripts.simulate_logs.command import Simulation, simulate
from dlrm.train.checkpoints.checkpoint import Checkpoint

FLAGS = "\n".join(["--batch_size=128", "--lr=0.01", "--mlp_optimizer=adam", *MODEL])
SCHEMA = """\
label: click
groups: [user]
numerical:
  - {column: price, transform: log}
categorical:
  - {column: item, type: string, frequency_limit: 2}
  - {column: user, type: integer, frequency_limit: 2}
"""


@pytest.fixture
def logs(tmp_path):
    """A folder for the days of `daily_steps.daily`."""
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs"


def write(logs, *names, text="rows"):
    for name in names:
        (logs / name).parent.mkdir(exist_ok=True)
        (logs / name).write_text(text)


def test_days_are_learned_in_the_order_of_their_numbers_after_they_were_judged(logs, tmp_path):
    write(logs, "day_10.csv", "day_9.csv", "README.md", ".day_3.csv", "day_4.csv.part", "day_5~")
    assert daily_steps.daily(tmp_path) == 0
    assert daily_steps.learned(tmp_path) == {"day_9": None, "day_10": 1}
    write(logs, "day_11.csv", "day_100.csv")
    (logs / "day_9.csv").unlink()  # is not needed any more
    assert daily_steps.daily(tmp_path, "--keep=2") == 0
    assert daily_steps.learned(tmp_path) == {"day_9": None, "day_10": 1, "day_11": 2, "day_100": 3}
    days = tmp_path / "chain/days"
    assert daily_steps.known(days / "day_100/run") == ["day_9", "day_10", "day_11", "day_100"]
    assert sorted(path.parent.name for path in days.glob("*/run")) == ["day_100", "day_11"]


def test_the_command_learns_nothing_twice(logs, tmp_path, capsys):
    write(logs, "1.csv", "2.csv")
    assert daily_steps.daily(tmp_path) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out] == ["day", "1", "2", "page:"]
    assert (tmp_path / "chain/daily.html").read_text().count("<tr>") == 3
    steps = (tmp_path / "chain/daily.log").read_text()
    (logs / "2.csv").rename(logs / "2.csv.gz")  # is still that day
    assert daily_steps.daily(tmp_path) == 0
    assert "nothing new since 2" in capsys.readouterr().out
    assert (tmp_path / "chain/daily.log").read_text() == steps


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("9.csv",), "9.csv: is before 10, which is learned"),
        (("11.csv", "11.parquet"), "11.parquet: expected one entry for a day, got"),
    ],
)
def test_days_without_a_clear_order_are_refused(logs, tmp_path, capsys, names, expected):
    write(logs, "10.csv")
    assert daily_steps.daily(tmp_path) == 0
    write(logs, *names)
    assert daily_steps.daily(tmp_path) == 1
    assert expected in capsys.readouterr().err
    assert daily_steps.learned(tmp_path) == {"10": None}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bad", "2.csv: dlrm prepare: exit code 1"),
        ("no", "2.csv: expected rows with and without a click, got 0 clicks"),
        ("yes", "2.csv: expected rows with and without a click, got 10 clicks"),
    ],
)
def test_a_bad_day_is_named_and_begun_anew_once_it_has_other_rows(
    logs, tmp_path, capsys, text, expected
):
    write(logs, "1.csv", "3.csv")
    write(logs, "2.csv", text=text)
    assert daily_steps.daily(tmp_path) == 1
    assert expected in capsys.readouterr().err
    assert daily_steps.learned(tmp_path) == {"1": None}
    write(logs, "2.csv", text="good rows")
    assert daily_steps.daily(tmp_path) == 0
    assert daily_steps.learned(tmp_path) == {"1": None, "2": 1, "3": 2}


def test_other_files_and_a_command_at_work_are_left_alone(logs, tmp_path, capsys):
    write(logs, "1.csv")
    (tmp_path / "chain/days/1").mkdir(parents=True)
    (tmp_path / "chain/days/1/thesis.txt").write_text("")
    assert daily_steps.daily(tmp_path) == 1
    assert "chain/days/1: exists and has no begun.json" in capsys.readouterr().err
    assert (tmp_path / "chain/days/1/thesis.txt").exists()
    with lock(tmp_path / "chain/.lock"):
        assert daily_steps.daily(tmp_path) == 1
    assert "another dlrm daily, or a step of it, is at work here" in capsys.readouterr().err


def write_day(folder, number, rows=1500):
    """Writes a day whose clicks follow from its items; each day has items of its own."""
    random = np.random.default_rng(number)
    items, users = random.integers(0, 40, rows) + 4 * number, random.integers(0, 50, rows)
    price = random.lognormal(2, 1, rows)
    labels = (random.random(rows) < np.where(items % 3 == 0, 0.8, 0.1)).astype(int)
    lines = [
        f"{c},{p:.3f},i{i},{u}" for c, p, i, u in zip(labels, price, items, users, strict=True)
    ]
    path = folder / f"2026-11-{number:02d}.csv"
    path.write_text("\n".join(["click,price,item,user", *lines]) + "\n")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with three days, and the chain that has learned them without interruption."""
    root = tmp_path_factory.mktemp("daily")
    (root / "logs").mkdir()
    for number in (1, 2, 3):
        write_day(root / "logs", number)
    (root / "schema.yaml").write_text(SCHEMA)
    (root / "small.flags").write_text(FLAGS)
    assert subprocess.run(words(root), cwd=root, check=False).returncode == 0
    return root


def words(root):
    flags = [f"--days={root}/logs", f"--schema={root}/schema.yaml", f"--output={root}/chain"]
    command = [sys.executable, "-m", "dlrm", "daily", *flags, "--cores=1"]
    return [*command, f"--train_flags={root}/small.flags"]


def test_errors_of_a_step_leave_out_advice_for_it_alone(tmp_path, capfd):
    (tmp_path / "logs").mkdir()
    write_day(tmp_path / "logs", 1, rows=20)
    day = tmp_path / "logs/2026-11-01.csv"
    day.write_text(day.read_text() + "0,abc,i1,2\n")
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    names = {"days": "logs", "schema": "schema.yaml", "output": "chain"}
    assert run(COMMANDS["daily"], [f"--{n}={tmp_path / path}" for n, path in names.items()]) == 1
    error = capfd.readouterr().err
    assert "2026-11-01.csv, line 22, column price" in error
    assert "--bad_lines" not in error


@pytest.mark.slow
def test_metrics_are_those_of_the_model_of_the_day_before(root, tmp_path):
    scores = tmp_path / "scores.npy"
    checkpoint, rows = root / "chain/days/2026-11-02/run", root / "logs/2026-11-03.csv"
    flags = [f"--checkpoint={checkpoint}", f"--input={rows}", f"--output={scores}"]
    assert run(COMMANDS["predict"], flags) == 0
    labels = [line[0] == "1" for line in rows.read_text().splitlines()[1:]]
    record = json.loads((root / "chain/days/2026-11-03/day.json").read_text())
    judged, found = record["judged"], np.load(scores)
    assert (record["rows"], record["clicks"]) == (1500, sum(labels))
    assert judged["auc"] == pytest.approx(roc_auc_score(labels, found), abs=1e-6)
    assert judged["log_loss"] == pytest.approx(log_loss(labels, found), abs=1e-5)
    assert judged["calibration"] == pytest.approx(found.mean() / np.mean(labels), abs=1e-4)
    assert judged["gauc_by_impressions"] is not None


def learned_files(chain):
    """Returns the files of a chain that are the same in every run."""
    kept = (".bin", ".safetensors", ".npy", "day.json", "transform.json", "daily.html")
    return {
        str(path.relative_to(chain)): path.read_bytes()
        for path in sorted(chain.rglob("*"))
        if path.is_file() and path.name.endswith(kept)
    }


@pytest.mark.slow
def test_a_chain_that_is_killed_in_each_step_ends_with_the_same_bytes(root):
    chain, kills, draw = root / "chain", 0, random.Random(0)
    chain.rename(root / "whole")
    for steps in range(1, 9):
        process = subprocess.Popen(words(root), stdout=subprocess.DEVNULL, start_new_session=True)
        log = chain / "daily.log"
        while process.poll() is None and not (
            log.exists() and log.read_text().count("$ dlrm") >= steps + kills
        ):
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 2))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
    assert kills >= 5  # a step may end before it is killed
    assert subprocess.run(words(root), check=False).returncode == 0
    found, expected = learned_files(chain), learned_files(root / "whole")
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []


@pytest.mark.slow
def test_a_step_that_outlives_its_command_keeps_others_out(root):
    shutil.rmtree(root / "chain")
    process = subprocess.Popen(words(root), stdout=subprocess.DEVNULL, start_new_session=True)
    log = root / "chain/daily.log"
    while not (log.exists() and "dlrm prepare" in log.read_text()):
        time.sleep(0.01)
    process.kill()
    process.wait()
    with pytest.raises(BlockingIOError), lock(root / "chain/.lock", "a step is at work"):
        pass
    with lock(root / "chain/.lock"):  # once the step has ended
        pass
    assert subprocess.run(words(root), check=False).returncode == 0


@pytest.mark.slow
def test_the_regularization_of_the_recipe_falls_with_the_rows_of_all_days(tmp_path):
    shape = {"num_numerical": 1, "num_categorical": 1, "missing": 0.0}
    simulate(Simulation(rows=40_000, days=2, **shape), tmp_path / "logs")
    (tmp_path / "schema.yaml").write_text(
        'label: 0\nformat: {delimiter: "\\t"}\nnumerical: [{column: 1, type: decimal}]\n'
        "categorical: [{column: 2, type: hexadecimal, frequency_limit: 2}]\n"
    )
    flags = [f"--days={tmp_path / 'logs'}", f"--schema={tmp_path / 'schema.yaml'}"]
    flags += ["--input_format=csv", "--noheader", f"--output={tmp_path / 'chain'}"]
    assert run(COMMANDS["daily"], flags) == 0
    runs = [
        Checkpoint.open(tmp_path / "chain/days" / day / "run").path for day in ("day_0", "day_1")
    ]
    found = [Checkpoint(run).config["flags"]["embedding_l2"] for run in runs]
    assert found == pytest.approx([350 / 20_000, 350 / 40_000], rel=0.05)
