"""`dlrm predict` scores by an exported model as by its checkpoint, and without torch."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

import dlrm
from dlrm.scripts.commands import main
from dlrm.serving import judged
from dlrm.serving.exported import exported_version, open_exported

# Runs a command and prints the heavy modules that it imported.
WITHOUT_TORCH = """
import sys
from dlrm.scripts.commands import main
code = main(sys.argv[1:])
print("heavy:", sorted({"torch", "sklearn", "pandas", "pyspark"} & set(sys.modules)))
sys.exit(code)
"""


@pytest.fixture(scope="module")
def repository(export, trained, tmp_path_factory):
    return export(trained, tmp_path_factory.mktemp("repository"))


def flags_of(model, source, output, *more):
    return ["predict", f"--checkpoint={model}", f"--input={source}", f"--output={output}", *more]


def test_scores_and_metrics_are_the_checkpoints_without_torch(
    repository, trained, tmp_path, capsys
):
    assert main(flags_of(trained.checkpoint, trained.log, tmp_path / "checkpoint.npy")) == 0
    expected = capsys.readouterr().out.splitlines()[1:]
    model, scores = repository / "model", tmp_path / "exported.npy"
    words = flags_of(model, trained.log, scores, "--batch_size=700")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    first, *lines, heavy = done.stdout.splitlines()
    assert f"by {model / '1'}" in first
    assert heavy == "heavy: []"
    assert lines == expected
    assert lines[0].startswith("auc 0.")
    np.testing.assert_allclose(np.load(scores), np.load(tmp_path / "checkpoint.npy"), rtol=1e-4)


def test_the_newest_version_of_a_model_scores(repository, trained, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(repository / "model", model)
    for version in ("9", "10"):
        shutil.copytree(model / "1", model / version)
    assert main(flags_of(model, trained.log, tmp_path / "s.npy")) == 0
    assert f"by {model / '10'}," in capsys.readouterr().out


def changed(version, path):
    facts = json.loads((version / path).read_text())
    (version / path).write_text(json.dumps(facts | {"output_kind": "probability"}))


def damaged(version, path):
    network = bytearray((version / path).read_bytes())
    network[len(network) // 2] ^= 1
    (version / path).write_bytes(network)


@pytest.mark.parametrize(
    ("damage", "flags", "message"),
    [
        (lambda version: changed(version, "model.json"), [], "--output-kind logit"),
        (lambda version: damaged(version, "model.onnx/model.onnx"), [], "model.onnx"),
        (lambda version: shutil.rmtree(version / "model.onnx"), [], "expected model.onnx"),
        (None, ["--explain=0"], "--explain: expected a checkpoint, got "),
        (None, ["--dataset=/nowhere"], "--dataset: expected a checkpoint, got "),
    ],
)
def test_what_cannot_be_scored_is_refused(
    repository, trained, tmp_path, capsys, damage, flags, message
):
    version = tmp_path / "model" / "1"
    shutil.copytree(repository / "model" / "1", version)
    if damage:
        damage(version)
    scores = tmp_path / "s.npy"
    assert main(flags_of(version, trained.log, scores, *flags)) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert str(version) in error
    assert not scores.exists()


def test_datasets_are_left_to_the_checkpoint(repository, trained, tmp_path, capsys):
    assert main(flags_of(repository / "model", trained.dataset, tmp_path / "s.npy")) == 1
    assert "expected raw rows, in a log or a table, for an exported" in capsys.readouterr().err


def test_a_faulty_row_is_named_with_its_line(repository, trained, tmp_path, capsys):
    log = tmp_path / "log.tsv"
    log.write_text("\n".join([*trained.lines[:5], trained.lines[5] + "\t1", trained.lines[6]]))
    assert main(flags_of(repository / "model", log, tmp_path / "s.npy")) == 1
    assert f"error: {log}, line 6" in capsys.readouterr().err


def test_an_exported_model_is_judged_as_its_checkpoint(repository, trained):
    model, log = dlrm.load(trained.checkpoint), str(trained.log)
    exported = open_exported(exported_version(repository / "model"), model.batch_size)
    assert judged.evaluate(exported, log) == pytest.approx(model.evaluate(log), rel=1e-4)
    assert judged.compare(exported, model, log)["auc"].value == pytest.approx(0, abs=1e-4)
    lost = [
        {one.field: one.auc_lost for one in judged.importance(scorer, log)}
        for scorer in (exported, model)
    ]
    assert lost[0] == pytest.approx(lost[1], abs=1e-4)
    recalibrated = judged.recalibrate(exported, log)
    assert judged.evaluate(recalibrated, log)["calibration"] == pytest.approx(1, abs=1e-3)
    assert exported.recalibration is None
