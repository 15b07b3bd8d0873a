"""`--seeds` trains an ensemble that averages logits and is scored and served like one model."""

import json
import shutil

import forked
import numpy as np
import pytest
import trained_model
from sklearn.metrics import log_loss, roc_auc_score

import dlrm
from dlrm.serving.importance import contributions
from dlrm.serving.rows.raw import inputs_of_text, text_of_lines
from dlrm.train.checkpoints.directory import find_checkpoint

pytestmark = pytest.mark.long
SEEDS = (1, 2, 5)


@pytest.fixture(scope="module")
def ensemble(trained, tmp_path_factory):
    """`trained` with an ensemble as its checkpoint."""
    path = tmp_path_factory.mktemp("ensemble") / "run"
    trained_model.train(trained.dataset, path, "--seeds=1-2,5", "--wide")
    return trained._replace(checkpoint=path)


@pytest.fixture(scope="module")
def by_member(ensemble):
    members = [dlrm.load(ensemble.checkpoint / f"seed-{seed}") for seed in SEEDS]
    return np.array([member.logits(ensemble.rows) for member in members], np.float64)


def test_its_logits_are_the_mean_of_its_members(ensemble, by_member):
    model = dlrm.load(ensemble.checkpoint)
    np.testing.assert_allclose(model.logits(ensemble.rows), by_member.mean(0), rtol=1e-5)
    assert by_member.std(0).min() > 0


def test_it_is_judged_on_the_test_rows(ensemble, by_member):
    best = json.loads((find_checkpoint(ensemble.checkpoint) / "progress.json").read_text())["best"]
    labels = [line[0] == "1" for line in ensemble.lines]
    logits = by_member.mean(0)
    assert best["auc"] == pytest.approx(roc_auc_score(labels, logits), abs=1e-9)
    assert best["log_loss"] == pytest.approx(log_loss(labels, 1 / (1 + np.exp(-logits))), rel=1e-6)


def test_a_member_is_what_its_seed_trains(ensemble, trained, tmp_path):
    alone = trained_model.train(trained.dataset, tmp_path / "run", "--seed=2", "--wide")
    member = find_checkpoint(ensemble.checkpoint) / "members/1"
    for name in ("dense.safetensors", "tables/0.bin", "tables/3.bin"):
        assert (member / name).read_bytes() == (find_checkpoint(alone) / name).read_bytes()


def test_resuming_adds_seeds_and_trains_no_other(ensemble, trained, by_member, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(ensemble.checkpoint, path)
    shutil.rmtree(path / "seed-5")
    kept = [*path.glob("seed-*/step-*/tables/0.bin")]
    before = {one: one.stat().st_mtime_ns for one in kept}
    trained_model.train(trained.dataset, path, "--seeds=1,2,5", "--resume", "--wide")
    np.testing.assert_allclose(dlrm.load(path).logits(ensemble.rows), by_member.mean(0), rtol=1e-5)
    assert {one: one.stat().st_mtime_ns for one in kept} == before
    trained_model.train(trained.dataset, path, "--seeds=1,2", "--resume", "--wide")
    np.testing.assert_allclose(
        dlrm.load(path).logits(ensemble.rows), by_member[:2].mean(0), rtol=1e-5
    )


def test_commands_score_judge_and_copy_it(ensemble, by_member, tmp_path):
    where = [f"--checkpoint={ensemble.checkpoint}", f"--dataset={ensemble.dataset}"]
    output = tmp_path / "scores.npy"
    forked.succeed("dlrm.scripts.predict", *where, f"--input={ensemble.log}", f"--output={output}")
    expected = 1 / (1 + np.exp(-by_member.mean(0)))
    np.testing.assert_allclose(np.load(output), expected, rtol=1e-4)
    page = tmp_path / "page"
    others = ("--bootstrap=0", "--importance", f"--output={page}")
    forked.succeed("dlrm.scripts.evaluate", *where, *others)
    facts = json.loads((page / "evaluation.json").read_text())
    labels = [line[0] == "1" for line in ensemble.lines]
    expected = roc_auc_score(labels, by_member.mean(0))
    assert facts["models"][0]["auc"]["value"] == pytest.approx(expected, abs=1e-6)
    dlrm.load(ensemble.checkpoint).save(tmp_path / "copy")
    logits = dlrm.load(tmp_path / "copy").logits(ensemble.rows)
    np.testing.assert_allclose(logits, by_member.mean(0), rtol=1e-5)


def test_contributions_are_the_mean_of_those_of_its_members(ensemble):
    def of(path):
        model = dlrm.load(path)
        lines = "\n".join(ensemble.rows[:5]).encode()
        text = text_of_lines(lines, len(model.row_transform.names))
        return contributions(model, inputs_of_text(model.row_transform, text))

    members = [of(ensemble.checkpoint / f"seed-{seed}") for seed in SEEDS]
    np.testing.assert_allclose(of(ensemble.checkpoint), np.mean(members, 0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "flags",
    [
        ("--onnx", "--output-kind=probability"),
        ("--ts-script",),
        ("--ts-trace",),
        ("--python", "--embedding-precision=fp16"),
    ],
)
def test_it_is_exported_as_one_graph(export, ensemble, tmp_path, flags):
    model = export(ensemble, tmp_path / "models", *flags) / "model/1"
    report = json.loads((model / "report.json").read_text())
    exact = not any("precision" in flag for flag in flags)
    assert report["greatest_difference"] < (1e-5 if exact else 0.05)
    tables = 3 * sum(path.stat().st_size for path in _tables(ensemble))
    assert report["table_bytes_fp32"] == tables
    if exact:
        assert report["table_bytes"] == tables
    else:
        assert report["table_bytes"] == tables / 2


def _tables(ensemble):
    return [
        find_checkpoint(ensemble.checkpoint) / f"members/0/tables/{index}.bin"
        for index in range(len(trained_model.TABLES))
    ]


def refused(module, *words, code=1):
    done = forked.run(module, *words)
    assert done.returncode == code, done
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_what_needs_a_single_model_says_so(ensemble, tmp_path):
    said = refused("dlrm.scripts.checkpoint", "inspect", ensemble.checkpoint, code=2)
    assert "the mean of 3 models" in said
    where = [f"--dataset={ensemble.dataset}", f"--load_checkpoint_path={ensemble.checkpoint}"]
    said = refused("dlrm.scripts.main", "--mode=test", *where, *trained_model.MODEL)
    assert "members/0 is the first" in said


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--seeds=3-1"], "--seeds 3-1: expected seeds such as 1-5 or 1,2,7, got '3-1'"),
        (["--seeds=1"], "--seeds 1: expected two seeds or more"),
        (["--seeds=1,2,1"], "--seeds 1,2,1: expected two seeds or more, each once"),
        (["--seeds=1-2", "--seed=1"], "--seeds 1-2 contradicts --seed 1"),
        (["--seeds=1-2", "--mode=test"], "--seeds 1-2 contradicts --mode test"),
        (["--seeds=1-2", "--save_checkpoint_path="], "--seeds 1-2 needs --save_checkpoint_path"),
    ],
)
def test_impossible_seeds_are_named(trained, tmp_path, flags, named):
    words = [f"--dataset={trained.dataset}", f"--save_checkpoint_path={tmp_path / 'run'}"]
    assert named in refused("dlrm.scripts.main", *words, *flags)
    assert not (tmp_path / "run").exists()
