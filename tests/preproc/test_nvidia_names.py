"""NVIDIA's preprocessing commands: their names, arguments and variables."""

import json
import os
import re
import subprocess
import sys

import forked
import pytest
from preproc_testing import GOOD, binary_files, day_files, reference_dataset, write_days
from test_scripts import PREPROC, SMALL, environment

from dlrm.data.transform.transform import Transform

OURS = ("INPUT_PATH", "OUTPUT_PATH", "FREQUENCY_LIMIT", "USE_FREQUENCY_LIMIT")


def script(name, *words, **variables):
    """Runs a script named as NVIDIA's, without Java or variables of ours."""
    env = environment("", "", ENGINE="local")
    env = {name: value for name, value in env.items() if name not in OURS} | variables
    command = [PREPROC / name, *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def raw(tmp_path):
    return write_days(tmp_path / "raw logs", GOOD * 3, GOOD * 2)


@pytest.mark.parametrize("words", [("1", "GPU", "Spark"), ("DGX2", "1")], ids=["2021", "2020"])
def test_the_whole_path_takes_nvidias_arguments_and_variables(raw, tmp_path, words):
    output = tmp_path / "an output" / "binary_dataset"
    paths = {"download_dir": str(raw), "final_output_dir": str(output)}
    others = {"spark_output_path": "/nowhere", "TOTAL_CORES": "80000"}
    done = script("prepare_dataset.sh", *words, *SMALL, **paths, **others)
    assert done.returncode == 0, done.stderr
    assert binary_files(output) == reference_dataset(day_files(raw), 2, 3, limit=lambda column: 1)
    machine = next(word for word in words if word in ("GPU", "DGX2"))
    assert f"note: {machine}: preprocessing runs on processor cores here" in done.stdout
    assert "note: spark_output_path is not used" in done.stdout
    assert done.stdout.count("TOTAL_CORES=80000: this machine has ") == 1


def test_spark_takes_its_paths_as_arguments(raw, tmp_path):
    words = ["CPU", str(raw), str(tmp_path / "out"), "1", *SMALL]
    done = script("run-spark.sh", *words, FREQUENCY_LIMIT="9")
    assert done.returncode == 0, done.stderr
    expected = reference_dataset(day_files(raw), 2, 3, limit=lambda column: 1)
    assert binary_files(tmp_path / "out" / "binary_dataset") == expected


@pytest.mark.parametrize(
    ("name", "words", "variables", "message"),
    [
        ("prepare_dataset.sh", ["15", "GPU", "NVTabular"], {}, "NVTabular: expected Spark; "),
        ("prepare_dataset.sh", ["15", "TPU"], {}, "TPU: expected a frequency limit, CPU or GPU"),
        ("run_spark.sh", ["CPU", "/in"], {}, "/in: expected [CPU] INPUT_PATH OUTPUT_PATH"),
        ("prepare_dataset.sh", [], {"final_output_dir": "/x"}, "final_output_dir=/x: expected a f"),
        ("verify_criteo_downloaded.sh", ["/no"], {"INPUT_PATH": "/"}, "/no: no such folder of day"),
        ("verify_criteo_downloaded.sh", ["/", "/"], {}, "/ /: expected one folder of day files"),
    ],
)
def test_what_is_not_served_is_one_line(name, words, variables, message):
    done = script(name, *words, **variables)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {message}")


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
        refused = spark_data_utils(f"--input_folder={raw}", word)
        assert refused.returncode == 1
        assert refused.stderr.startswith("error: ")
        assert message in refused.stderr


@pytest.mark.slow
def test_a_folder_with_half_of_the_last_day_is_transformed(raw, tmp_path):
    write_days(tmp_path / "three", GOOD, GOOD * 3, GOOD * 2)
    common = (f"--model_folder={tmp_path / 'models'}", *SMALL, "--output_ordering=input")
    fitted = spark_data_utils(
        "--mode=generate_models", f"--input_folder={raw}", "--frequency_limit=1", *common
    )
    assert fitted.returncode == 0, fitted.stderr
    (tmp_path / "half").mkdir()
    lines = (tmp_path / "three" / "day_2").read_text().splitlines(keepends=True)
    (tmp_path / "half" / "day_2").write_text("".join(lines[: len(lines) // 2]))

    def transform(name, *words):
        output = f"--output_folder={tmp_path / name / 'out'}"
        folder = f"--input_folder={tmp_path / name}"
        return spark_data_utils("--mode=transform", *common, folder, output, *words)

    for name, *words in (("half", "--days=2-2"), ("three", "--days=2-2", "--half=first")):
        done = transform(name, *words)
        assert done.returncode == 0, done.stderr
    assert binary_files(tmp_path / "half" / "out") == binary_files(tmp_path / "three" / "out")
    for words, message in (
        ([], "day_0: missing, though there is a day_2; .*--days A-B .*--input_file .*--half first"),
        (["--days=1-2"], r"day_1: missing; expected day_1 to day_2 \(--days\)"),
        (["--days=2-2", "--cores=100000"], "--cores 100000: expected 1 to"),
    ):
        refused = transform("half", *words, f"--output_folder={tmp_path / 'refused'}")
        assert refused.returncode == 1
        assert re.search(message, refused.stderr), refused.stderr
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("refused")]


SAYS_CORES = "import os; print(*sorted(os.sched_getaffinity(0)))"


def bind(root, *words, **variables):
    command = [root / "bind.sh", *words, "--", sys.executable, "-S", "-c", SAYS_CORES]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_each_rank_is_bound_to_its_share_of_the_cores(root):
    cores = sorted(os.sched_getaffinity(0))
    ranks = min(2, len(cores))
    bound = []
    for rank in range(ranks):
        done = bind(root, "--cpu=exclusive", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
        assert done.returncode == 0, done.stderr
        bound += [[int(core) for core in done.stdout.split()]]
    assert {len(own) for own in bound} == {len(cores) // ranks}
    assert sum(bound, []) == cores[: len(cores) // ranks * ranks]
    assert bind(root, "--cpu=off").stdout.split() == [str(core) for core in cores]
    many = str(len(cores) + 1)
    for words, variables, message in (
        (["--cpu=dgxa100_ccx.sh"], {}, "--cpu=dgxa100_ccx.sh: expected exclusive, node or off"),
        (["--gpu"], {}, "expected --cpu=exclusive|node|off"),
        ([], {"LOCAL_WORLD_SIZE": many}, f"expected at most {len(cores)} ranks"),
    ):
        done = bind(root, *words, **variables)
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: bind.sh: {message}")
