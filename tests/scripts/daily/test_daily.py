"""`dlrm daily` from raw files to the page, with kills and refusals on the way."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from dlrm.scripts.commands import COMMANDS, run
from dlrm.scripts.simulate_logs.command import Simulation, simulate
from dlrm.train.checkpoints.checkpoint import read_config
from dlrm.train.checkpoints.directory import find_checkpoint

pytestmark = pytest.mark.slow
FLAGS = """\
--batch_size=128
--embedding_dim=4
--bottom_mlp_sizes=8,4
--top_mlp_sizes=8,1
--lr=0.01
--warmup_steps=0
--decay_start_step=0
--decay_steps=0
--mlp_optimizer=adam
--embedding_optimizer=adam
"""
SCHEMA = """\
label: click
groups: [user]
numerical:
  - {column: price, transform: log}
categorical:
  - {column: item, type: string, frequency_limit: 2}
  - {column: user, type: integer, frequency_limit: 2}
"""


def write_day(folder, number, rows=1500, clicks=None):
    """Writes a day whose clicks follow from its items; each day has items of its own."""
    random = np.random.default_rng(number)
    items, users = random.integers(0, 40, rows) + 4 * number, random.integers(0, 50, rows)
    price = random.lognormal(2, 1, rows)
    chance = np.where(items % 3 == 0, 0.8, 0.1) if clicks is None else np.full(rows, clicks)
    labels = (random.random(rows) < chance).astype(int)
    lines = [
        f"{c},{p:.3f},i{i},{u}" for c, p, i, u in zip(labels, price, items, users, strict=True)
    ]
    path = folder / f"2026-11-{number:02d}.csv"
    path.write_text("\n".join(["click,price,item,user", *lines]) + "\n")
    return path


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with three days, and the chain that has learned them without interruption."""
    root = tmp_path_factory.mktemp("daily")
    (root / "logs").mkdir()
    for number in (1, 2, 3):
        write_day(root / "logs", number)
    (root / "schema.yaml").write_text(SCHEMA)
    (root / "small.flags").write_text(FLAGS)
    assert daily(root) in (0, 3)
    return root


def words(root, *others):
    flags = ["--days=logs", "--schema=schema.yaml", "--output=chain", "--cores=1"]
    return [*flags, "--train_flags=small.flags", *others]


def daily(root, *others):
    before = os.getcwd()
    os.chdir(root)
    try:
        return run(COMMANDS["daily"], words(root, *others))
    finally:
        os.chdir(before)


@pytest.fixture
def learned(root, tmp_path):
    """A copy of the folder, at the same path, which is put back."""
    kept = tmp_path / "kept"
    shutil.copytree(root, kept, symlinks=True)
    yield root
    shutil.rmtree(root)
    shutil.copytree(kept, root, symlinks=True)


def record(root):
    return json.loads((root / "chain/daily.json").read_text())


def test_each_day_is_judged_before_it_is_learned(root, tmp_path):
    first, second, third = record(root)["days"]
    assert [first["rows"], second["rows"], third["rows"]] == [1500] * 3
    assert not first["judged"]
    assert second["judged"].keys() == {"continued", "frozen"}
    assert second["judged"]["continued"] == second["judged"]["frozen"]  # of the first day, both
    assert third["judged"]["continued"] != third["judged"]["frozen"]
    scores = tmp_path / "scores.npy"
    checkpoint, rows = root / "chain/days/2026-11-02/run", root / "logs/2026-11-03.csv"
    flags = [f"--checkpoint={checkpoint}", f"--input={rows}", f"--output={scores}"]
    assert run(COMMANDS["predict"], flags) == 0
    labels = [line[0] == "1" for line in rows.read_text().splitlines()[1:]]
    judged, found = third["judged"]["continued"], np.load(scores)
    assert judged["auc"] == pytest.approx(roc_auc_score(labels, found), abs=1e-6)
    assert judged["log_loss"] == pytest.approx(log_loss(labels, found), abs=1e-5)
    assert judged["calibration"] == pytest.approx(found.mean() / np.mean(labels), abs=1e-4)
    assert judged["gauc_by_impressions"] is not None
    assert third["fields"]["item"]["unknown"] > 0.05  # items of this day alone
    assert "page" not in third
    page = (root / "chain/daily.html").read_text()
    assert "2026-11-03" in page
    assert "model of the first day" in page


def test_the_command_learns_nothing_twice(root, capsys):
    before = {path: path.stat().st_mtime_ns for path in (root / "chain/days").rglob("*")}
    alarms = record(root)["days"][-1]["alarms"]
    assert daily(root) == (3 if alarms else 0)
    assert "nothing new: 2026-11-03 is the last day" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (root / "chain/days").rglob("*")} == before


def refused(root, capsys, expected, *others):
    """Runs the command, and compares its error and that nothing is learned."""
    before = (root / "chain/daily.json").read_bytes()
    assert daily(root, *others) == 1
    error = capsys.readouterr().err
    assert expected in error, error
    assert (root / "chain/daily.json").read_bytes() == before


def test_the_last_day_can_be_learned_anew(learned, capsys):
    before = record(learned)["days"]
    with open(learned / "small.flags", "a") as file:
        file.write("--seed=5\n")
    assert daily(learned, "--undo=2026-11-03") == 0
    assert "2026-11-03: removed; 2026-11-02 is the last day" in capsys.readouterr().out
    assert record(learned)["days"] == before[:2]
    assert daily(learned) in (0, 3)
    assert record(learned)["days"] == before
    assert "small.flags is not the file with which 2026-11-01 was" in capsys.readouterr().out


def test_comments_of_the_schema_may_change_and_columns_may_not(learned, capsys):
    schema = learned / "schema.yaml"
    schema.write_text(f"# of the shop\n{SCHEMA}")
    assert daily(learned) in (0, 3)
    schema.write_text(SCHEMA.replace("transform: log", "transform: none"))
    refused(learned, capsys, "got another one: numerical price: transform: 'log' in the transform")


def test_days_without_clicks_and_tiny_days_are_refused(learned, capsys):
    path = write_day(learned / "logs", 4, clicks=0.0)
    refused(learned, capsys, "2026-11-04.csv: expected rows with and without a click, got 0 clicks")
    assert not (learned / "chain/days/2026-11-04").exists()
    write_day(learned / "logs", 4, rows=12, clicks=0.5)
    refused(learned, capsys, "expected 15 rows or more (--least_rows 0.01 of the 1,500 of")
    assert daily(learned, "--skip=2026-11-04") == 0
    assert daily(learned, "--accept=2026-11-04") in (0, 3)
    assert record(learned)["days"][-1]["rows"] == 12
    path.unlink()
    assert daily(learned) == 3  # the alarms of the last day stand


def test_an_unreadable_day_is_refused_and_can_be_mended(learned, capfd):
    path = write_day(learned / "logs", 4)
    whole = path.read_text()
    path.write_text(whole.replace("\n", "\n1,cheap,i1,1\n", 1))
    assert daily(learned) == 1
    assert "cheap" in capfd.readouterr().err
    path.write_text(whole)
    assert daily(learned) in (0, 3)
    assert [day["name"][-1] for day in record(learned)["days"]] == ["1", "2", "3", "4"]


def test_alarms_are_an_exit_code(learned, capsys):
    write_day(learned / "logs", 4, clicks=0.9)
    assert daily(learned, "--most_miscalibration=0.1", "--least_auc=0.9") == 3
    out = capsys.readouterr().out
    assert "warning: 2026-11-04: calibration" in out
    assert "is below --least_auc 0.9" in out
    assert len(record(learned)["days"][-1]["alarms"]) >= 2


def test_a_recalibration_is_fitted_to_each_day_before_it_is_learned(learned, tmp_path):
    for number in (4, 5):
        write_day(learned / "logs", number)
    assert daily(learned, "--recalibrate", "--compare=") in (0, 3)
    judged = {day["name"][-1]: day["judged"].get("continued") for day in record(learned)["days"]}
    days, scores = learned / "chain/days", tmp_path / "scores.npy"
    flags = [f"--checkpoint={days}/2026-11-04/run", f"--input={learned}/logs/2026-11-05.csv"]
    assert run(COMMANDS["predict"], [*flags, f"--output={scores}"]) == 0
    fitted = json.loads(next(days.glob("2026-11-04/run/step-*/recalibration/*")).read_text())
    assert fitted["kind"] == "platt"
    assert fitted["fitted_to"]["sources"] == [str(learned / "logs/2026-11-04.csv")]
    clicks = [
        line.startswith("1,") for line in (learned / "logs/2026-11-05.csv").read_text().split()[1:]
    ]
    assert judged["5"]["calibration"] == pytest.approx(
        np.load(scores).mean() / np.mean(clicks), abs=1e-4
    )
    assert not list(days.glob("*/recalibrated"))
    assert not list(days.glob("2026-11-03/run/step-*/recalibration"))


def contents(chain):
    """Returns what a chain leaves, except for logs, which have times."""
    kept = (".bin", ".safetensors", ".npy", "daily.json", "table.json")
    return {
        str(path.relative_to(chain)): path.read_bytes()
        for path in sorted(chain.rglob("*"))
        if path.is_file() and path.name.endswith(kept)
    }


def test_a_chain_that_is_killed_ends_with_the_same_bytes(learned):
    expected = contents(learned / "chain")
    shutil.rmtree(learned / "chain")
    command = [sys.executable, "-m", "dlrm", "daily", *words(learned)]
    kills = 0
    for steps in range(12):  # more than the lines about times, one for each step
        process = subprocess.Popen(
            command, cwd=learned, stdout=subprocess.DEVNULL, start_new_session=True
        )
        log = learned / "chain/daily.log"
        while process.poll() is None and not (
            log.exists() and log.read_text().count('{"day"') > steps
        ):
            time.sleep(0.02)
        if process.poll() is None:
            time.sleep(0.03 * steps)
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
    assert kills >= 5  # a step may end before the command is killed after the one before
    assert daily(learned) in (0, 3)
    found = contents(learned / "chain")
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []


def test_retraining_on_all_days_is_compared(learned):
    write_day(learned / "logs", 4)
    assert daily(learned, "--compare=frozen,retrained") in (0, 3)
    judged = record(learned)["days"][-1]["judged"]
    assert judged.keys() == {"continued", "frozen", "retrained"}
    assert not (learned / "chain/days/2026-11-04/retrained").exists()


def test_the_regularization_of_the_recipe_falls_with_the_rows_of_all_days(tmp_path):
    simulate(Simulation(rows=40_000, days=2, num_numerical=2, num_categorical=2), tmp_path / "logs")
    shape = ("--num_numerical=2", "--num_categorical=2", "--frequency_limit=2")
    days, chain = f"--days={tmp_path / 'logs'}", tmp_path / "chain"
    assert run(COMMANDS["daily"], [days, "--schema=criteo", f"--output={chain}", *shape]) in (0, 3)
    runs = [find_checkpoint(chain / "days" / day / "run") for day in ("day_0", "day_1")]
    found = [read_config(run)["flags"]["embedding_l2"] for run in runs]
    assert found == pytest.approx([350 / 20_000, 350 / 40_000], rel=0.05)


def test_logs_in_criteo_format_are_learned(tmp_path):
    simulation = Simulation(rows=3000, days=2, num_numerical=2, num_categorical=2)
    planted = simulate(simulation, tmp_path / "logs")["days"]
    (tmp_path / "small.flags").write_text(FLAGS)
    shape = ("--num_numerical=2", "--num_categorical=2", "--frequency_limit=2")
    assert daily(tmp_path, "--schema=criteo", *shape) in (0, 3)
    days = record(tmp_path)["days"]
    assert [(day["name"], day["rows"]) for day in days] == [("day_0", 1500), ("day_1", 1500)]
    assert days[1]["clicks"] == round(planted[1]["click_rate"] * 1500)
    manifest = json.loads(
        (tmp_path / "chain/days/day_1/dataset/binary_dataset/manifest.json").read_text()
    )
    assert manifest["rows"]["train"] == 1500
