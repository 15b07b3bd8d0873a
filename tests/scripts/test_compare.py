"""`dlrm.scripts.compare`: runs side by side."""

import json
import shutil

import pytest
import trained_model

from dlrm.scripts.compare import main


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
    head, *rows = said(capsys, runs, "--sort=auc")
    assert head.split()[:3] == ["run", "steps", "auc"]
    assert head.split()[-1] == "--lr"
    assert [row.split()[0] for row in rows] == ["fast", "slow"]
    assert [row.split()[-1] for row in rows] == ["0.02", "0.0001"]
    best = json.loads((runs / "fast/checkpoints/best.json").read_text())
    assert f"{best['auc']:.6f}" == rows[0].split()[2]
    log = (runs / "fast/log.json").read_text().splitlines()[-1].removeprefix("DLLL ")
    speed = json.loads(log)["data"]["average_train_throughput"]
    assert f"{speed:,.0f}" in rows[0].split()
    _, *rows = said(capsys, runs / "slow", runs / "fast" / "checkpoints", "--sort=lr")
    assert [row.split()[0] for row in rows] == ["slow", "fast"]


def test_the_page_has_the_table_and_all_curves(runs, tmp_path, capsys):
    said(capsys, runs, f"--output={tmp_path / 'out'}")
    text = (tmp_path / "out/comparison.html").read_text()
    assert text.count("<tr>") == 3
    assert text.count("role='img'") == 2
    assert "fast: best test auc" in text
    assert "src=" not in text
    assert "http" not in text
    facts = json.loads((tmp_path / "out/comparison.json").read_text())
    assert len(facts["runs"][0]["curve"]) >= 25


def test_what_is_no_run_is_named(runs, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    copy = shutil.copytree(runs / "fast", tmp_path / "copy")
    (copy / "log.json").write_text("no log\n")
    for path, message in (
        (tmp_path / "nothing", "no such directory"),
        (tmp_path / "empty", "no run here"),
        (copy, "log.json: expected lines that begin with 'DLLL '"),
    ):
        with pytest.raises(SystemExit):
            main([str(path)])
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(runs), "--sort=beauty"])
    assert "--sort beauty: expected a metric or a flag" in capsys.readouterr().err
