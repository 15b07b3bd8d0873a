"""The demo names its engine, and ends as the command that fails does.

`tests/test_real_input.py` and `.ci/wheel` run it to its end.
"""

import os

import forked
import pytest

JAVA = "#!/bin/sh\necho 'openjdk version \"{}\"' >&2\n"


@pytest.mark.parametrize(
    ("version", "engine"),
    [
        (None, "local, since there is no {}/bin/java (JAVA_HOME); for Spark (the same bytes): "),
        ("11.0.2", "local, since {}/bin/java is Java 11.0.2; Spark needs 17 or newer; for Spark "),
        ("21.0.2", "spark, on Java 21.0.2; without Spark (the same bytes): --engine local"),
    ],
)
def test_the_demo_takes_spark_only_if_it_is_installed(tmp_path, version, engine):
    pytest.importorskip("pyspark")
    if version is not None:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "java").write_text(JAVA.format(version))
        (tmp_path / "bin" / "java").chmod(0o755)
    env = {**os.environ, "JAVA_HOME": str(tmp_path)}
    done = forked.run("dlrm.scripts.demo", "--raw=none", cwd=tmp_path, env=env)
    assert f"engine: {engine.format(tmp_path)}" in done.stdout
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "/none" in line
    assert "training" not in done.stdout
