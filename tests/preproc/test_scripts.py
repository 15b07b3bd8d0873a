"""NVIDIA's preprocessing commands, as a user runs them: names, arguments and variables."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from preproc_testing import GOOD, binary_files, day_files, reference_dataset, write_days

from dlrm.data.transform.transform import Transform
from dlrm.preproc.logs.raw_log import find_days
from dlrm.scripts.simulate_logs.command import Simulation, simulate

pytestmark = pytest.mark.long
PREPROC = Path(__file__).resolve().parents[2] / "preproc"
SMALL = ("--num_numerical", "2", "--num_categorical", "3")
SETTINGS = {
    *("INPUT_PATH", "OUTPUT_PATH", "SPARK_LOCAL_DIRS", "TOTAL_CORES", "TOTAL_MEMORY"),
    *("FREQUENCY_LIMIT", "USE_FREQUENCY_LIMIT", "NUM_DAYS", "SPARK_MASTER", "ENGINE"),
}


def script(*words, name="prepare_dataset.sh", **variables):
    """Runs a script with the local engine, and no variables of ours but those given."""
    inherited = {k: v for k, v in os.environ.items() if k not in SETTINGS}
    ours = {"PYTHON": sys.executable, "TOTAL_CORES": "1", "TOTAL_MEMORY": "2", "ENGINE": "local"}
    return subprocess.run(
        [PREPROC / name, *words],
        env=inherited | ours | {name: str(value) for name, value in variables.items()},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def fails(done, *words):
    """Checks that a script failed with one message, not Java's."""
    assert done.returncode != 0
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line


@pytest.fixture
def raw(tmp_path):
    return write_days(tmp_path / "raw logs", GOOD * 3, GOOD * 2)  # the space is on purpose


@pytest.fixture
def expected(raw):
    return reference_dataset(day_files(raw), 2, 3, limit=lambda column: 1)


def test_whole_path_on_one_core(spark, tmp_path):
    simulate(Simulation(rows=500, days=2), tmp_path / "raw logs")
    paths = {"INPUT_PATH": tmp_path / "raw logs", "OUTPUT_PATH": tmp_path / "an output"}
    settings = {"USE_FREQUENCY_LIMIT": "2", "NUM_DAYS": "2", "ENGINE": "spark"}
    done = script("--seed", "7", **paths, **settings, SPARK_LOCAL_DIRS=tmp_path / "tmp")
    assert done.returncode == 0, done.stderr
    output = tmp_path / "an output"
    expected = reference_dataset(day_files(tmp_path / "raw logs"), limit=lambda c: 2, seed=7)
    assert binary_files(output / "binary_dataset") == expected
    for stage in ("dictionary:", "train:", "test:", "validation:", "positive", "UI: http"):
        assert stage in done.stdout
    assert str(output / "binary_dataset") in done.stdout.splitlines()[-1]
    assert done.stderr == ""
    assert sorted(path.name for path in output.iterdir()) == ["binary_dataset", "spark.log"]


@pytest.mark.parametrize("words", [("1", "GPU", "Spark"), ("DGX2", "1")], ids=["2021", "2020"])
def test_the_whole_path_takes_nvidias_arguments_and_variables(raw, expected, tmp_path, words):
    output = tmp_path / "an output" / "binary_dataset"
    paths = {"download_dir": raw, "final_output_dir": output, "JAVA_HOME": tmp_path}  # no Java
    done = script(*words, *SMALL, **paths, spark_output_path="/nowhere", TOTAL_CORES="80000")
    assert done.returncode == 0, done.stderr
    assert binary_files(output) == expected
    assert [path.name for path in output.parent.iterdir()] == ["binary_dataset"]
    machine = next(word for word in words if word in ("GPU", "DGX2"))
    assert f"note: {machine}: preprocessing runs on processor cores here" in done.stdout
    assert "note: spark_output_path is not used" in done.stdout
    assert done.stdout.count("TOTAL_CORES=80000: this machine has ") == 1


def test_spark_takes_its_paths_as_arguments(raw, expected, tmp_path):
    words = ["CPU", raw, tmp_path / "out", "1", *SMALL, "--engine=local"]
    done = script(*words, name="run-spark.sh", FREQUENCY_LIMIT="9", ENGINE="spark")
    assert done.returncode == 0, done.stderr
    assert binary_files(tmp_path / "out" / "binary_dataset") == expected


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


PREPARE, VERIFY = "prepare_dataset.sh", "verify_criteo_downloaded.sh"
REFUSED = [  # the script, its words and variables, and what is said; INPUT_PATH has two days
    (PREPARE, ["15", "GPU", "NVTabular"], {}, "NVTabular: expected Spark; "),
    (PREPARE, ["15", "TPU"], {}, "TPU: expected a frequency limit, CPU or GPU"),
    (PREPARE, [], {"final_output_dir": "/x", "OUTPUT_PATH": ""}, "final_output_dir=/x: expected a"),
    (PREPARE, [], {"NUM_DAYS": "24"}, "expected 24 day files (NUM_DAYS), got day_0 to day_1"),
    (PREPARE, [], {"INPUT_PATH": "/nowhere"}, "/nowhere: no such folder of day files (INPUT_PATH)"),
    (PREPARE, [], {"TOTAL_CORES": "many"}, "TOTAL_CORES=many"),
    (PREPARE, [], {"ENGINE": "sprak"}, "ENGINE=sprak: expected spark, or local"),
    (PREPARE, ["--no_such_flag"], {}, "no_such_flag"),
    ("run_spark.sh", ["CPU", "/in"], {}, "/in: expected [CPU] INPUT_PATH OUTPUT_PATH"),
    (VERIFY, ["/no"], {"INPUT_PATH": "/"}, "/no: no such folder of day"),
    (VERIFY, ["/", "/"], {}, "/ /: expected one folder of day files"),
]


@pytest.mark.parametrize(("name", "words", "variables", "message"), REFUSED)
def test_what_is_not_served_is_one_line(raw, tmp_path, name, words, variables, message):
    paths = {"INPUT_PATH": raw, "OUTPUT_PATH": tmp_path / "out"}
    fails(script(*words, name=name, **paths | variables), message)
    assert not (tmp_path / "out").exists()


def test_days_beside_a_file_of_all_and_outputs_in_the_way_are_named(raw, tmp_path):
    (tmp_path / "file").write_text("in the way")
    fails(script(*SMALL, INPUT_PATH=raw, OUTPUT_PATH=tmp_path / "file"), str(tmp_path / "file"))
    foreign = tmp_path / "out" / "binary_dataset"
    foreign.mkdir(parents=True)
    (foreign / "thesis.txt").write_text("not ours")
    words = str(foreign), "not replaced"
    fails(script(*SMALL, INPUT_PATH=raw, OUTPUT_PATH=tmp_path / "out"), *words)
    assert (foreign / "thesis.txt").read_text() == "not ours"
    (raw / "train.txt").write_text(GOOD)
    done = script(*SMALL, INPUT_PATH=raw, OUTPUT_PATH=tmp_path / "other")
    fails(done, "day files or train.txt", "both")


@pytest.mark.parametrize("name", ["prepare_dataset.sh", "run_spark.sh"])
def test_help_shows_variables_and_flags_without_days_and_java(tmp_path, name):
    paths = {"INPUT_PATH": "/no", "OUTPUT_PATH": tmp_path / "out", "JAVA_HOME": tmp_path}
    done = script("--help" if name[0] == "p" else "-h", name=name, **paths, ENGINE="spark")
    assert done.returncode == 0, done.stderr
    for text in ("INPUT_PATH  ", "TOTAL_MEMORY", "--num_numerical", "--output_ordering"):
        assert text in done.stdout
    assert not (tmp_path / "out").exists()


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
    paths = {"INPUT_PATH": raw, "OUTPUT_PATH": tmp_path / "out", "JAVA_HOME": home}
    done = script(*SMALL, **paths, ENGINE="spark")
    assert done.returncode != 0
    for text in (complaint, "sudo apt-get install -y openjdk-17-jre-headless", "sudo dnf install"):
        assert text in done.stderr
    assert not (tmp_path / "out").exists()


def spark_data_utils(*words):
    return forked.run(PREPROC / "spark_data_utils.py", "--engine=local", "--cores=1", *words)


def test_the_steps_take_nvidias_flags(raw, tmp_path):
    common = (f"--input_folder={raw}", f"--model_folder={tmp_path / 'models'}", *SMALL, "--low_mem")
    common += ("--write_mode=overwrite", "--frequency_limit=1")
    fitted = spark_data_utils("--mode=generate_models", *common, "--skew_broadcast_pct=1.0")
    assert fitted.returncode == 0, fitted.stderr
    assert "note: --low_mem is not used: memory is bounded in any case" in fitted.stdout
    assert "note: --skew_broadcast_pct is not used" in fitted.stdout
    out = (f"--output_folder={tmp_path / 'train'}", f"--model_size_file={tmp_path / 'sizes.json'}")
    done = spark_data_utils("--mode=transform", "--days=0-0", *common, *out)
    assert done.returncode == 0, done.stderr
    sizes = json.loads((tmp_path / "sizes.json").read_text())
    fitted_sizes = Transform.load(tmp_path / "models").cardinalities
    assert sizes == {f"_c{14 + i}": size - 1 for i, size in enumerate(fitted_sizes)}
    assert max(fitted_sizes) > 2
    for word, message in (
        ("--no_numeric_log_col", "whose transform in the schema is none"),
        ("--model_size_file=x", "--model_size_file: is for --mode transform"),
    ):
        fails(spark_data_utils(f"--input_folder={raw}", word), message)


@pytest.mark.slow
def test_a_folder_with_half_of_the_last_day_is_transformed(raw, tmp_path):
    write_days(tmp_path / "three", GOOD, GOOD * 3, GOOD * 2)
    common = (f"--model_folder={tmp_path / 'models'}", *SMALL, "--output_ordering=input")
    of_raw = f"--input_folder={raw}", "--frequency_limit=1"
    fitted = spark_data_utils("--mode=generate_models", *of_raw, *common)
    assert fitted.returncode == 0, fitted.stderr
    write_days(tmp_path / "half", GOOD)
    (tmp_path / "half" / "day_0").rename(tmp_path / "half" / "day_2")

    def transform(name, *words):
        paths = f"--output_folder={tmp_path / name / 'out'}", f"--input_folder={tmp_path / name}"
        return spark_data_utils("--mode=transform", *common, *paths, *words)

    for name, *words in (("half", "--days=2-2"), ("three", "--days=2-2", "--half=first")):
        done = transform(name, *words)
        assert done.returncode == 0, done.stderr
    assert binary_files(tmp_path / "half" / "out") == binary_files(tmp_path / "three" / "out")
    for words, message in (
        ([], "day_0: missing, though there is a day_2; .*--days A-B .*--input_file .*--half first"),
        (["--days=1-2"], r"day_1: missing; expected day_1 to day_2 \(--days\)"),
        (["--days=2-2", "--cores=100000"], "--cores 100000: expected 1 to"),
    ):
        done = transform("half", *words, f"--output_folder={tmp_path / 'refused'}")
        assert done.returncode == 1
        assert re.search(message, done.stderr), done.stderr
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("refused")]
