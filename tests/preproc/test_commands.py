"""Preprocessing commands name themselves as they are called, from a wheel or a clone."""

import subprocess
import sys

import pytest

SCRIPTS = {
    "prepare_logs": "spark_data_utils",
    **{name: name for name in ("prepare_text", "prepare_images", "convert_to_binary")},
}


@pytest.mark.parametrize("module", SCRIPTS)
def test_the_help_begins_with_the_description(module, root, tmp_path):
    script = f"{SCRIPTS[module]}.py"
    for command in (["-m", f"dlrm.preproc.{module}"], [str(root / "preproc" / script)]):
        done = subprocess.run(
            [sys.executable, *command, "--help"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.startswith("Turns ")
        assert "python preproc/" not in done.stdout
