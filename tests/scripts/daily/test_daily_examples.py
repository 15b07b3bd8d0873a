"""The commands in the examples for cron and Airflow run, and their flags exist."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dlrm.documents import read_yaml
from dlrm.scripts.daily import main

FOLDER = Path(__file__).resolve().parents[3] / "examples/daily"


def commands() -> dict[str, str]:
    """Returns the commands for a shell, by where they are."""
    (line,) = re.findall(r"^[^#\n].*$", (FOLDER / "daily.cron").read_text(), re.M)
    found = {"cron": line.split(maxsplit=5)[5]}
    for call in ast.walk(ast.parse((FOLDER / "daily_dag.py").read_text())):
        if isinstance(call, ast.Call):
            own = {keyword.arg: keyword.value for keyword in call.keywords}
            if "bash_command" in own:
                texts = {name: ast.literal_eval(own[name]) for name in ("task_id", "bash_command")}
                found[texts["task_id"]] = texts["bash_command"]
    return found


def test_the_flags_of_the_examples_exist(capsys):
    assert main(["--help"]) == 0
    known = capsys.readouterr().out
    flags = re.findall(r"^  --(?:\[no\])?(\w+):", known, re.M)
    assert {*read_yaml(FOLDER / "daily.yaml")} <= {*flags}


def run(command, root):
    """Runs a command with `dlrm` and `mail` on the path, in place of /srv/ctr."""
    programs = root / "bin"
    programs.mkdir(exist_ok=True)
    for name, line in (
        ("dlrm", f'exec "{sys.executable}" -m dlrm "$@"'),
        ("mail", f'echo "$2" > {root}/mail'),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)
    python = os.pathsep.join([str(FOLDER.parents[1]), os.environ.get("PYTHONPATH", "")])
    path = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": python}
    return subprocess.run(
        ["bash", "-c", command.replace("/srv/ctr", str(root))], env=os.environ | path, check=False
    )


@pytest.mark.slow
def test_the_commands_of_the_examples_run(tmp_path):
    from test_daily import FLAGS, SCHEMA, write_day

    (tmp_path / "logs").mkdir()
    write_day(tmp_path / "logs", 1)
    write_day(tmp_path / "logs", 2)
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    (tmp_path / "small.flags").write_text(FLAGS)
    text = (FOLDER / "daily.yaml").read_text()
    (tmp_path / "daily.yaml").write_text(f"{text}train_flags: small.flags\n")
    found = commands()
    assert run(found["cron"], tmp_path).returncode == 0
    assert "nothing new" not in (tmp_path / "daily.out").read_text()
    assert not (tmp_path / "mail").exists()
    assert run(found["learn"], tmp_path).returncode == 0
    for version in ("1", "2"):  # of the day, and of a task that is run again
        assert run(found["export"], tmp_path).returncode == 0
        assert (tmp_path / "models/model" / version).is_dir()
    (tmp_path / "logs/2026-11-03.csv").write_text("no table")
    run(found["cron"], tmp_path)
    assert (tmp_path / "mail").read_text() == "dlrm daily: exit code 1\n"
