"""`dlrm.scripts.compare`: runs side by side."""

import json
import re
import shutil

import pytest
import trained_model

from dlrm.scripts.compare.__main__ import main


@pytest.fixture(scope="module")
def runs(trained, tmp_path_factory):
    """A folder of two runs that differ in the learning rate."""
    folder = tmp_path_factory.mktemp("runs")
    for name, rate in (("fast", "0.02"), ("slow", "0.0001")):
        trained_model.train(trained.dataset, folder / name / "checkpoints", f"--lr={rate}")
    return folder


def said(capsys, *arguments):
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_folder_is_a_table_of_what_differs(runs, capsys):
    head, *rows, roles = said(capsys, runs, "--sort=auc")
    assert head.split()[:4] == ["run", "steps", "best_step", "auc"]
    assert head.split()[-1] == "--lr"
    assert [row.split()[0] for row in rows] == ["fast", "slow"]
    assert [row.split()[-1] for row in rows] == ["0.02", "0.0001"]
    best = json.loads((runs / "fast/checkpoints/best.json").read_text())
    assert [str(best["step"]), f"{best['auc']:.6f}"] == rows[0].split()[2:4]
    log = (runs / "fast/log.json").read_text().splitlines()[-1].removeprefix("DLLL ")
    speed = json.loads(log)["data"]["average_train_throughput"]
    assert f"{speed:,.0f}" in rows[0].split()
    assert roles == "metrics of the best test, on test rows: chosen on"
    _, *rows, _ = said(capsys, runs / "slow", runs / "fast" / "checkpoints", "--sort=lr")
    assert [row.split()[0] for row in rows] == ["slow", "fast"]


@pytest.mark.parametrize("key", ["log_loss", "best_validation_loss", "test_normalized_entropy"])
def test_the_lowest_loss_comes_first(runs, capsys, key):
    _, *rows, _ = said(capsys, runs, f"--sort={key}")
    paths = [runs / row.split()[0] / "checkpoints/best.json" for row in rows]
    fast, slow = (json.loads(path.read_text())["log_loss"] for path in paths)
    assert fast < slow


def test_the_page_has_the_table_and_all_curves(runs, tmp_path, capsys):
    said(capsys, runs, f"--output={tmp_path / 'out'}")
    text = (tmp_path / "out/comparison.html").read_text()
    assert text.count("<tr>") == 3
    assert text.count('role="img"') == 2
    best = re.search(r"<dt>best run</dt><dd>(.*?)</dd><dd class=\"note\">(.*?)</dd>", text)
    assert best[1] == "fast"
    assert best[2].startswith("by AUC, after ")
    row = re.search(r'<tr><th scope="row" data-value="fast">.*?</tr>', text, re.DOTALL)[0]
    auc = json.loads((runs / "fast/checkpoints/best.json").read_text())["auc"]
    assert f'<td data-value="{auc:.6f}">{auc:.4f}</td>' in row
    assert "fast: best test auc" in text
    assert "src=" not in text
    assert "http" not in text
    facts = json.loads((tmp_path / "out/comparison.json").read_text())
    assert len(facts["runs"][0]["curve"]) >= 25


def test_runs_without_a_test_or_a_checkpoint_are_said(runs, trained, tmp_path, capsys):
    trained_model.train(trained.dataset, tmp_path / "untested/checkpoints", "--max_steps=5")
    shutil.copytree(runs / "fast", tmp_path / "fast")
    (tmp_path / "diverged").mkdir()
    shutil.copy(runs / "fast/log.json", tmp_path / "diverged")
    _, fast, untested, _, note = said(capsys, tmp_path)
    assert fast.split()[0] == "fast"
    assert untested.split()[:4] == ["untested", "5", "–", "–"]
    assert note == f"note: {tmp_path / 'diverged'} has a log and no checkpoint, and is left out"
    said(capsys, tmp_path, f"--output={tmp_path / 'out'}")
    page = (tmp_path / "out/comparison.html").read_text()
    loss, auc = page.split("<figure>")[1:]
    assert (">untested<" in loss, ">untested<" in auc) == (True, False)


def test_an_output_that_cannot_be_written_is_refused_first(runs, tmp_path, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes").touch()
    for path, message in (
        (tmp_path / "file/out", "file: expected a directory to write in, got a file"),
        (tmp_path / "full", "has no manifest.json, so it was not written by this program"),
    ):
        assert main([str(runs), f"--output={path}"]) == 1
        out, err = capsys.readouterr()
        assert not out
        assert message in err


def test_what_is_no_run_is_named(runs, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    copy = shutil.copytree(runs / "fast", tmp_path / "copy")
    (copy / "log.json").write_text("no log\n")
    for path, message in (
        (tmp_path / "nothing", "no such directory"),
        (tmp_path / "empty", "no run here"),
        (copy, "log.json: expected lines that begin with 'DLLL '"),
    ):
        assert main([str(path)]) == 1
        assert message in capsys.readouterr().err
    assert main([str(runs), "--sort=beauty"]) == 1
    assert "--sort beauty: expected a metric or a flag" in capsys.readouterr().err
