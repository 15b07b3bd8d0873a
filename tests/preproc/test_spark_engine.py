"""Spark's settings, and measures in its processes that keep small tasks cheap."""

import os
import signal
from pathlib import Path

import pytest

from dlrm.preproc.execution.spark_engine import configuration, own_local_folders

SOCKETS = "spark.python.unix.domain.socket.enabled"


def test_what_killed_spark_left_goes_with_the_next(tmp_path, monkeypatch):
    folder = tmp_path / "spark-tmp"
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(folder))
    child = os.fork()
    if not child:
        with own_local_folders():
            blocks = Path(os.environ["SPARK_LOCAL_DIRS"], "blockmgr-x")
            blocks.mkdir(parents=True)
            (blocks / "data").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert list(folder.rglob("data"))
    (folder / "of another").mkdir()
    with own_local_folders():
        (own,) = os.environ["SPARK_LOCAL_DIRS"].split(",")
        assert Path(own).parent == folder
        assert not list(folder.rglob("data"))
        (Path(own) / "data").touch()
    assert [path.name for path in folder.iterdir()] == ["of another"]
    assert os.environ["SPARK_LOCAL_DIRS"] == str(folder)


def test_what_is_loaded_is_no_garbage_to_look_for_after_every_task(spark, tmp_path):
    def note(item):
        import gc
        import os

        (tmp_path / str(item)).write_text(f"{os.getpid()} {gc.get_freeze_count()}")

    spark.run("frozen", note, range(8))
    frozen = [path.read_text().split() for path in tmp_path.iterdir()]
    assert len(frozen) == 8
    for process, objects in frozen:
        assert int(process) != os.getpid()
        assert int(objects) > 10_000  # pyspark and numpy


@pytest.mark.parametrize("master", ["local[2]", "local-cluster[2,1,1024]", "spark://host:7077"])
def test_settings_of_others_prevail(master):
    ours = configuration(master, 4, "/code", {})
    assert ours[SOCKETS] == "true"
    assert "TieredStopAtLevel=1" in ours["spark.executor.defaultJavaOptions"]
    theirs = {SOCKETS: "false", "spark.driver.memory": "9g"}
    assert configuration(master, 4, "/code", theirs) == ours | theirs


@pytest.mark.parametrize("master", [None, "yarn", "k8s://https://host:6443"])
def test_clusters_of_others_keep_their_java_options(master):
    ours = configuration(master, 4, "/code", {})
    assert SOCKETS not in ours
    assert not any("defaultJavaOptions" in name for name in ours)
    assert ours["spark.executor.memory"] == "2g"
