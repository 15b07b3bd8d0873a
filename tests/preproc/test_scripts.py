"""`prepare_dataset.sh` and the scripts under it, as a user runs them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from preproc_testing import GOOD, binary_files, day_files, reference_dataset, write_days

from dlrm.preproc.logs.raw_log import find_days
from dlrm.scripts.simulate_logs.command import Simulation, simulate

pytestmark = pytest.mark.long
PREPROC = Path(__file__).resolve().parents[2] / "preproc"
SMALL = ("--num_numerical", "2", "--num_categorical", "3")
SETTINGS = {
    *("INPUT_PATH", "OUTPUT_PATH", "SPARK_LOCAL_DIRS", "TOTAL_CORES", "TOTAL_MEMORY"),
    *("FREQUENCY_LIMIT", "USE_FREQUENCY_LIMIT", "NUM_DAYS", "SPARK_MASTER", "ENGINE"),
}


def environment(raw, output, **settings):
    inherited = {k: v for k, v in os.environ.items() if k not in SETTINGS}
    paths = {"INPUT_PATH": str(raw), "OUTPUT_PATH": str(output), "PYTHON": sys.executable}
    return inherited | paths | {"TOTAL_CORES": "1", "TOTAL_MEMORY": "2"} | settings


def script(raw, output, *arguments, name="prepare_dataset.sh", **settings):
    return subprocess.run(
        [PREPROC / name, *arguments],
        env=environment(raw, output, **settings),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def fails(result, *words):
    """Checks that a script failed with one message, not Java's."""
    assert result.returncode != 0
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]


@pytest.fixture
def raw(tmp_path):
    return write_days(tmp_path / "raw logs", GOOD * 3, GOOD * 2)  # the space is on purpose


def test_whole_path_on_one_core(spark, tmp_path):
    simulate(Simulation(rows=500, days=2), tmp_path / "raw logs")
    output = tmp_path / "an output"
    settings = {"USE_FREQUENCY_LIMIT": "2", "NUM_DAYS": "2"}
    result = script(tmp_path / "raw logs", output, "--seed", "7", **settings)
    assert result.returncode == 0, result.stderr
    expected = reference_dataset(day_files(tmp_path / "raw logs"), limit=lambda c: 2, seed=7)
    assert binary_files(output / "binary_dataset") == expected
    for stage in ("dictionary:", "train:", "test:", "validation:", "positive", "UI: http"):
        assert stage in result.stdout
    assert str(output / "binary_dataset") in result.stdout.splitlines()[-1]
    assert result.stderr == ""
    assert sorted(path.name for path in output.iterdir()) == ["binary_dataset", "spark.log"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: (raw / "day_1").rename(raw / "day_2"), ("day_1", "missing")),
        (lambda raw: (raw / "day_0").unlink(), ("day_0", "missing")),
        (lambda raw: (raw / "day_1").unlink(), ("at least 2", "day_0 to day_0")),
        (lambda raw: (raw / "day_1").write_text(""), ("day_1", "empty")),
        (lambda raw: (raw / "day_2.gz").touch(), ("day_2.gz", "empty")),
    ],
)
def test_missing_days_are_named(raw, change, words):
    change(raw)
    with pytest.raises((ValueError, FileNotFoundError)) as refused:
        find_days(raw)
    assert all(word in str(refused.value) for word in words)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("notes.txt", {"NUM_DAYS": "24"}, ("24", "NUM_DAYS", "day_0 to day_1")),
        ("notes.txt", {"INPUT_PATH": "/nowhere"}, ("/nowhere", "INPUT_PATH")),
        ("train.txt", {}, ("day files or train.txt", "both")),
    ],
)
def test_the_script_checks_the_days_first(raw, tmp_path, name, settings, words):
    (raw / name).write_text(GOOD)
    fails(script(raw, tmp_path / "out", *SMALL, **settings), *words)
    assert not (tmp_path / "out").exists()


def test_output_that_cannot_be_written_is_named(java, raw, tmp_path):
    (tmp_path / "file").write_text("in the way")
    fails(script(raw, tmp_path / "file", *SMALL), str(tmp_path / "file"))
    foreign = tmp_path / "out" / "binary_dataset"
    foreign.mkdir(parents=True)
    (foreign / "thesis.txt").write_text("not ours")
    fails(script(raw, tmp_path / "out", *SMALL), str(foreign), "not replaced")
    assert (foreign / "thesis.txt").read_text() == "not ours"


@pytest.mark.parametrize("how", [("--engine", "local"), ()])
def test_without_spark_no_java_is_needed(raw, tmp_path, how):
    settings = {"JAVA_HOME": str(tmp_path)} | ({} if how else {"ENGINE": "local"})
    result = script(raw, tmp_path / "an output", *SMALL, *how, FREQUENCY_LIMIT="1", **settings)
    assert result.returncode == 0, result.stderr
    expected = reference_dataset(day_files(raw), 2, 3, limit=lambda column: 1)
    assert binary_files(tmp_path / "an output" / "binary_dataset") == expected
    assert [path.name for path in (tmp_path / "an output").iterdir()] == ["binary_dataset"]


@pytest.mark.parametrize(
    ("name", "flag"), [("prepare_dataset.sh", "--help"), ("run_spark.sh", "-h")]
)
def test_help_shows_variables_and_flags_without_days_and_java(tmp_path, name, flag):
    result = script(tmp_path / "no", tmp_path / "out", flag, name=name, JAVA_HOME=str(tmp_path))
    assert result.returncode == 0, result.stderr
    for text in ("INPUT_PATH  ", "TOTAL_MEMORY", "--num_numerical", "--output_ordering"):
        assert text in result.stdout
    assert not (tmp_path / "out").exists()


def test_wrong_arguments_are_refused(java, raw, tmp_path):
    result = script(raw, tmp_path / "out", "--no_such_flag")
    assert result.returncode != 0
    assert "no_such_flag" in result.stderr
    fails(script(raw, tmp_path / "out", *SMALL, FREQUENCY_LIMIT="15,2:3"), "column 2")
    fails(script(raw, tmp_path / "out", *SMALL, TOTAL_CORES="many"), "TOTAL_CORES=many")
    assert not (tmp_path / "out").exists()


def test_an_engine_that_is_not_there_is_named(raw, tmp_path):
    result = script(raw, tmp_path / "out", *SMALL, ENGINE="sprak")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ENGINE=sprak: expected spark, or local")


@pytest.mark.parametrize(
    ("version", "complaint"),
    [(None, "there is no "), ('java version "1.8.0_292"', "is Java 1.8.0_292")],
)
def test_missing_java_says_how_to_install_it(raw, tmp_path, version, complaint):
    home = tmp_path / "java"
    if version:
        (home / "bin").mkdir(parents=True)
        (home / "bin" / "java").write_text(f"#!/bin/sh\necho '{version}' >&2\n")
        (home / "bin" / "java").chmod(0o755)
    result = script(raw, tmp_path / "out", *SMALL, JAVA_HOME=str(home))
    assert result.returncode != 0
    assert complaint in result.stderr
    assert "sudo apt-get install -y openjdk-17-jre-headless" in result.stderr
    assert "sudo dnf install" in result.stderr
    assert not (tmp_path / "out").exists()
