"""Files of earlier versions, written by `make_fixtures`, open, score as before and resume."""

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import make_fixtures
import make_table_fixtures
import numpy as np
import observations
import pytest
from archives import ARCHIVES, SCORES, Written

from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import open_datasets
from dlrm.data.verification import MEMORY
from dlrm.scripts.checkpoint import __main__ as checkpoint_tool
from dlrm.scripts.verify_dataset.command import verify
from dlrm.train.checkpoints.directory import best_checkpoint, last_checkpoint

pytestmark = pytest.mark.long
DATASETS = make_fixtures.DATASETS | make_table_fixtures.DATASETS
RUNS = make_fixtures.RUNS | make_table_fixtures.RUNS
# After 7 to 12 more steps, each of which carries earlier rounding errors on. Without AVX,
# with AVX2, with 2 threads, or with 1 process instead of 2, losses differ by 2.4e-7 and logits by
# 4.8e-7 at most. If the optimizer's state is lost, they differ by 5e-3 and 0.5; if the random
# generators' state is lost, losses differ by 3e-4.
RESUMED = {"rtol": 2e-5, "atol": 1e-5}
# bfloat16 lookups: a value that rounds the other way changes by 2**-8 of its size.
RESUMED_BF16 = {"rtol": 1e-2, "atol": 1e-2}
# AUCs are over about 300 rows, where two swapped pairs change the AUC by 1e-4 at most.
COUNTED = {"rtol": 0, "atol": 1e-4}


def test_all_that_is_written_is_tested(written):
    assert ARCHIVES
    assert written.expected["rows"].keys() <= DATASETS.keys()
    assert written.expected["runs"].keys() <= RUNS.keys()
    assert sum(path.stat().st_size for path in ARCHIVES) < 1 << 20


@pytest.mark.parametrize("name", DATASETS)
def test_a_dataset_has_its_rows(written, name):
    if name == "hdf5":
        pytest.importorskip("h5py", reason="needs dlrm[text]")
    kind, options = written.entry("rows", name)
    directory = written.folder / name

    def files():
        return {p: p.stat().st_ino for p in directory.rglob("*") if p.name != MEMORY}

    before = files()
    found, expected = observations.read_rows(kind, directory, options), written.arrays(name)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_array_equal(found[key], values, err_msg=key)
    assert files() == before


@pytest.mark.parametrize("name", sorted(DATASETS.keys() - {"hdf5"}))
def test_nothing_is_wrong_with_a_dataset(written, name):
    _, options = written.entry("rows", name)
    assert list(verify(written.folder / name, options.get("num_numerical_features", 13))) == []


def test_a_synthetic_dataset_is_a_split_one(written):
    written.entry("rows", "synthetic")
    data = open_datasets(DataConfig(dataset=str(written.folder / "synthetic")))
    labels = data.train.batch(0).labels.numpy()
    np.testing.assert_array_equal(labels, written.arrays("synthetic")["train labels"])


def assert_measures(found, expected, tolerance):
    """Asserts that measures are equal, up to another processor's rounding."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        counted = any(part in name for part in ("auc", "top", "accuracy"))
        limits = COUNTED if counted and tolerance is not RESUMED_BF16 else tolerance
        np.testing.assert_allclose(found[name], value, **limits, err_msg=name)


@pytest.mark.parametrize("name", [name for name in RUNS if RUNS[name][0] == "main"])
def test_checkpoints_of_a_dlrm_score_rows(written, name):
    run, expected = written.entry("runs", name), written.arrays(f"scores-{name}")
    directory = written.folder / "runs" / name
    found = observations.scores_of_rows(written.folder, run["flags"], directory)
    for key, scores in found.items():
        assert scores.dtype == np.float32
        np.testing.assert_allclose(scores, expected[key], **SCORES, err_msg=key)


@pytest.mark.parametrize("name", RUNS)
def test_checkpoints_test_as_they_did(written, name):
    run, directory = written.entry("runs", name), written.folder / "runs" / name
    assert best_checkpoint(directory).name == f"step-{run['best_step']:09d}"
    found = observations.score(run["command"], run["flags"], directory, written.folder)
    assert found.keys() == run["tested"].keys()
    for checkpoint, measures in run["tested"].items():
        assert_measures(found[checkpoint], measures, SCORES)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_as_if_nothing_had_stopped_it(written, name, tmp_path, capsys):
    run = written.entry("runs", name)
    directory = _copied(written, name, tmp_path)
    resumed = _resuming(written, run, directory, tmp_path)
    summary = observations.known(observations.run(run["command"], resumed))
    assert _says_resumed(run, directory) in capsys.readouterr().out
    _assert_ends(written, name, directory, summary)


@pytest.mark.slow
def test_two_processes_go_on_with_a_run_of_two(written, tmp_path):
    run = written.entry("runs", "two_processes")
    directory = _copied(written, "two_processes", tmp_path)
    resumed = _resuming(written, run, directory, tmp_path)
    launcher = ["torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    command = [sys.executable, "-m", *launcher, "-m", "dlrm.scripts.main", *resumed]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert _says_resumed(run, directory) in done.stdout
    summary = json.loads((tmp_path / "log.json").read_text().splitlines()[-1][5:])["data"]
    _assert_ends(written, "two_processes", directory, observations.known(summary))


def _copied(written: Written, name: str, folder: Path) -> Path:
    return Path(shutil.copytree(written.folder / "runs" / name, folder / "run"))


def _resuming(written: Written, run: dict, directory: Path, folder: Path) -> list[str]:
    """Returns the command line that resumes a run whose dataset has moved."""
    flags = [flag.format(written.folder) for flag in run["flags"]]
    own = [f"--save_checkpoint_path={directory}", f"--log_path={folder / 'log.json'}"]
    return [*flags, *own, "--resume"]


def _says_resumed(run: dict, directory: Path) -> str:
    step = run["step"]
    return f"resumed from {directory}/step-{step:09d}: {step} steps are done"


def _assert_ends(written: Written, name: str, directory: Path, summary: dict) -> None:
    """Asserts that the run ends like the uninterrupted one."""
    run = written.expected["runs"][name]
    tolerance = RESUMED_BF16 if name == "bf16" else RESUMED
    assert last_checkpoint(directory).name == f"step-{run['final_step']:09d}"
    assert run["final_step"] > run["step"]
    assert_measures(summary, run["final_metrics"], tolerance)
    tested = observations.score(run["command"], run["flags"], directory, written.folder)
    for weights, measures in run["final_tested"].items():
        if weights == "last" or f"step-{run['final_step']:09d}" in weights:
            assert_measures(tested[weights], measures, tolerance)
    if run["command"] == "main":
        found = observations.scores_of_rows(written.folder, run["flags"], directory)["last"]
        expected = written.arrays(f"scores-{name}")
        np.testing.assert_allclose(found, expected["final"], **tolerance)
        assert abs(expected["final"] - expected["last"]).max() > 0.05  # it has learned since


@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_is_inspected(written, name, capsys):
    run = written.entry("runs", name)
    path = written.folder / "runs" / name / f"step-{run['step']:09d}"
    assert checkpoint_tool.main(["inspect", "--check", "--json", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == run["step"]


@pytest.fixture
def ask():
    """Returns `observations.ask`; skips without ONNX Runtime."""
    pytest.importorskip("onnxruntime", reason="needs dlrm[serve]")
    return observations.ask


def test_an_export_answers(written, ask):
    if not (written.folder / "models" / "model" / "1" / "model.py").exists():
        pytest.skip(f"{written.folder.name} has no code of its export")
    stored = written.arrays("answers")
    found = ask(written.folder / "models" / "model" / "1", stored)
    for name, answer in found.items():
        np.testing.assert_allclose(answer, stored[name], **SCORES)


def test_an_export_takes_a_further_version(written, ask, root, tmp_path):
    written.entry("runs", "single")
    for package in ("tritonclient.grpc", "onnxscript"):
        pytest.importorskip(package, reason="needs dlrm[serve]")
    models = Path(shutil.copytree(written.folder / "models", tmp_path / "models"))
    command = [
        *(sys.executable, root / "triton" / "export.py", "--update", f"--save-dir={models}"),
        f"--checkpoint={written.folder / 'runs' / 'single'}",
        f"--dataset={written.folder / 'split'}",
    ]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    run = functools.partial(subprocess.run, capture_output=True, text=True, check=False)
    done = run(list(map(str, command)), env=environment)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (models / "model").glob("[0-9]*")) == ["1", "2"]
    stored = written.arrays("answers")
    for version in ("1", "2"):
        for name, answer in ask(models / "model" / version, stored).items():
            np.testing.assert_allclose(answer, stored[name], **SCORES)
