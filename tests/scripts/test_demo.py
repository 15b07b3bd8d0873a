"""The demo ends as the command that fails does.

`tests/test_real_input.py` and `.ci/wheel` run it to its end.
"""

import forked


def test_the_demo_ends_with_the_error_of_its_command(tmp_path):
    done = forked.run("dlrm.scripts.demo", "--raw=none", cwd=tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "/none" in line
    assert "training" not in done.stdout
