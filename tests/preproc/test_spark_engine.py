"""Spark's settings, and measures in its processes that keep small tasks cheap."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from dlrm.command_line import Terminated, terminable
from dlrm.preproc.engines import configuration, open_engine, own_local_folders, session_engine
from dlrm.preproc.errors import EngineError
from dlrm.preproc.spark_engine import SparkEngine

pytestmark = pytest.mark.long
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


def test_what_is_loaded_is_no_garbage_to_look_for_after_every_task(spark):
    def note(item):
        import gc
        import os

        return os.getpid(), gc.get_freeze_count()

    list(spark.map(note, range(4)))  # after which it is loaded
    for process, objects in spark.map(note, range(8)):
        assert process != os.getpid()
        assert objects > 10_000  # pyspark and numpy


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


def test_a_running_spark_is_used_and_left(spark, tmp_path):
    said = []
    (tmp_path / "out.unfinished").mkdir()
    how = tmp_path, None, None, tmp_path / "out", said.append
    with open_engine("spark", 7, *how) as engine:
        assert engine.cores == spark.cores == 2
        assert engine.session.sparkContext is spark.session.sparkContext
    assert said[0].startswith(
        "note: uses the Spark session of this process (local[2]), so --master"
    )
    assert said[1] == f"Spark UI: {spark.session.sparkContext.uiWebUrl}"
    assert [path.name for path in tmp_path.rglob("*")] == ["out.unfinished"]
    assert list(spark.map(str, range(3))) == ["0", "1", "2"]


def test_tasks_have_the_umask_of_the_command(spark, tmp_path):
    before = os.umask(0o007)
    try:
        engine = SparkEngine(spark.session)
    finally:
        os.umask(before)
    list(engine.map(lambda item: (tmp_path / str(item)).touch(), range(4)))
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o660}


def test_a_folder_in_which_no_task_can_write_is_named_at_the_start(spark, tmp_path):
    (tmp_path / "proc").symlink_to("/proc")  # where not even root creates files
    with pytest.raises(EngineError, match=r"cannot create a file: '/proc'\. Every executor needs"):
        session_engine(spark.session, tmp_path / "proc" / "out", lambda line: None)


def test_an_error_is_said_in_a_line(spark):
    def broken(item):
        raise RuntimeError(f"no item {item}")

    with pytest.raises(EngineError) as raised:
        list(spark.map(broken, [7]))
    assert str(raised.value) == "Spark failed: RuntimeError: no item 7"


def test_a_signal_ends_a_stage_and_the_next_one_runs(spark, tmp_path):
    begun, end = tmp_path / "begun", tmp_path / "end"
    task = f"touch {begun}; until [ -e {end} ]; do sleep 0.1; done"

    def stop():
        while not begun.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    with terminable(), pytest.raises(Terminated):
        list(spark.map(os.system, [task]))
    end.touch()  # the stage has ended before its task may
    assert list(spark.map(str, [7])) == ["7"]
