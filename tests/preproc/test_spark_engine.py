"""Spark's settings, and measures in its processes that keep small tasks cheap."""

import os
import signal
import threading
import time
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from dlrm.command_line import Terminated, terminable
from dlrm.preproc.errors import EngineError
from dlrm.preproc.execution.spark_engine import (
    SparkEngine,
    configuration,
    own_local_folders,
    spark_engine,
)

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


def test_a_running_spark_is_used_and_left(spark, tmp_path):
    said = []
    settings = {"spark.executor.memory": "9g"}
    with spark_engine("local[7]", 1, None, settings, [tmp_path], said.append) as engine:
        assert engine.cores == spark.cores
        assert engine.session().sparkContext is spark.session().sparkContext
    assert said[0].startswith(
        "note: uses the Spark session of this process (local[2]), so --master"
    )
    assert said[1] == f"Spark UI: {spark.address}"
    assert not list(tmp_path.iterdir())
    spark.run("after", lambda item: (tmp_path / str(item)).touch(), range(3))
    assert len(list(tmp_path.iterdir())) == 3


def test_tasks_have_the_umask_of_the_command(spark, tmp_path):
    before = os.umask(0o007)
    try:
        with spark_engine("local[2]", 1, say=lambda line: None) as engine:
            engine.run("write", lambda item: (tmp_path / str(item)).touch(), range(4))
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o660}


def test_a_folder_in_which_no_task_can_write_is_named_at_the_start(spark, tmp_path):
    folders = [tmp_path, Path("/proc")]  # where not even root creates files
    with (
        pytest.raises(EngineError, match=r"cannot create a file: '/proc'\. Every executor needs"),
        spark_engine("local[2]", 1, None, {}, folders, lambda line: None),
    ):
        pytest.fail("no task should run")


def test_all_causes_of_an_error_are_said(spark):
    def broken(item):
        try:
            {}[item]
        except KeyError as error:
            raise RuntimeError(f"no item {item}") from error

    with pytest.raises(EngineError) as raised:
        spark.run("broken", broken, [7])
    assert str(raised.value).startswith("Spark failed: ")
    assert str(raised.value).endswith("KeyError: 7; RuntimeError: no item 7")
    assert "\n" not in str(raised.value)


def test_the_reason_why_spark_stopped_is_said_not_what_followed(tmp_path):
    error = pytest.importorskip("py4j.protocol").Py4JError("SparkContext was shut down")
    spark = MagicMock(defaultParallelism=1)
    spark.getConf().get.return_value = "120s"
    spark.parallelize.side_effect = error
    log = tmp_path / "spark.log"
    log.write_text(
        "18:13:19 ERROR StandaloneSchedulerBackend: Application has been killed. Reason: old age\n"
        "18:13:19 ERROR Inbox: Ignoring error\norg.apache.spark.SparkException: Exiting\n"
    )
    expected = "Spark stopped: Application has been killed. Reason: old age"
    with pytest.raises(EngineError, match=expected):
        SparkEngine(spark).start(log=log)


def test_a_signal_ends_a_stage_and_the_next_one_runs(spark, tmp_path):
    begun, end = tmp_path / "begun", tmp_path / "end"
    task = f"touch {begun}; until [ -e {end} ]; do sleep 0.1; done"

    def stop():
        while not begun.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    with terminable(), pytest.raises(Terminated):
        spark.run("stopped", os.system, [task])
    end.touch()  # the stage has ended before its task may
    spark.run("next", Path.touch, [tmp_path / "touched"])
    assert (tmp_path / "touched").exists()
