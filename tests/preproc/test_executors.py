"""Tasks compare their executor with the driver before they begin."""

import os
import pickle
import platform
import sys
from unittest.mock import patch

import pytest

import dlrm
from dlrm.preproc.errors import EngineError, TaskError
from dlrm.preproc.spark.executors import error_of, sent

cloudpickle = pytest.importorskip("pyspark.cloudpickle")


def received(task):
    """Returns a task as an executor receives it."""
    return pickle.loads(cloudpickle.dumps(sent(task, 0o022)))


def refusal(task, kind=EngineError):
    with pytest.raises(RuntimeError) as raised:
        list(task(1))
    error = error_of(RuntimeError(f"Traceback:\n{raised.value}\nCaused by: others"))
    assert isinstance(error, kind)
    return str(error)


def test_a_task_runs_on_an_executor_like_the_driver(tmp_path):
    assert list(received(range)(3)) == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        list(received(lambda item: item / 0)(1))


def test_errors_of_input_and_output_have_the_host_and_user():
    def fail(item):
        raise FileNotFoundError(2, "No such file or directory", "/shared/day_0")

    said = refusal(received(fail), TaskError)
    where = f"(on host {platform.node()} as user {os.geteuid()})"
    assert said == f"[Errno 2] No such file or directory: '/shared/day_0' {where}"


def test_another_version_is_named_with_the_host():
    where = f"the executor on host {platform.node()} ({sys.executable})"
    with patch.object(dlrm, "__version__", "9.9"):
        said = refusal(received(range))
    assert said == f"{where} has dlrm 9.9, and the driver {dlrm.__version__}"


def test_a_missing_package_is_named_with_ways_to_send_it():
    with patch.dict(sys.modules, {"dlrm": None}):
        said = refusal(received(range))
    assert " has no module 'dlrm'; PYSPARK_PYTHON names the Python of the executors" in said
    assert "--py-files dlrm.zip" in said
