"""Preprocessing commands name themselves as they are called, from a wheel or a clone."""

import subprocess
import sys

import pytest

COMMANDS = {
    "logs": ["-m", "dlrm.preproc.prepare_logs"],
    "spark_data_utils": ["preproc/spark_data_utils.py"],
    "images": ["-m", "dlrm.vision.preparation.command"],
    "text": ["-m", "dlrm.language.pretraining.command"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_begins_with_the_description(name, root):
    done = subprocess.run(
        [sys.executable, *COMMANDS[name], "--help"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("Turns ")
    assert "python preproc/" not in done.stdout
