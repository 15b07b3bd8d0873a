"""Preprocessing commands name themselves as they are called, from a wheel or a clone."""

import subprocess
import sys

import pytest

SCRIPTS = {
    "prepare_logs": "spark_data_utils",
    **{name: name for name in ("prepare_text", "prepare_images", "convert_to_binary")},
}


@pytest.mark.parametrize("module", SCRIPTS)
def test_the_usage_is_what_was_called(module, root, tmp_path):
    script = f"{SCRIPTS[module]}.py"
    for command, name in (
        (["-m", f"dlrm.preproc.{module}"], f"python -m dlrm.preproc.{module}"),
        ([str(root / "preproc" / script)], script),
    ):
        done = subprocess.run(
            [sys.executable, *command, "--help"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.startswith(f"usage: {name} [-h]")
        assert "python preproc/" not in done.stdout
