"""The generated reference pages are those of the code."""

import subprocess
import sys


def test_flags_and_python_api_are_up_to_date(root):
    command = [sys.executable, root / "docs" / "generate.py", "--check"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
