"""Tasks compare their executor with the driver before they begin."""

import pickle
import platform
import sys
from unittest.mock import patch

import pytest

import dlrm
from dlrm.preproc.errors import EngineError, TaskError
from dlrm.preproc.executors import error_of, host_and_user, sent

cloudpickle = pytest.importorskip("pyspark.cloudpickle")


def received(task, driver=None):
    """Returns a task as an executor receives it."""
    return pickle.loads(cloudpickle.dumps(sent(task, (0o022, driver or host_and_user()))))


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


def test_errors_of_input_and_output_have_the_host_and_user_of_another():
    def fail(item):
        raise FileNotFoundError(2, "No such file or directory", "/shared/day_0")

    assert refusal(received(fail), TaskError).endswith("directory: '/shared/day_0'")
    said = refusal(received(fail, ("driver", "root")), TaskError)
    host, user = host_and_user()
    assert said.endswith(f"'/shared/day_0' (on host {host} as user {user}; not seen by this node)")


def test_another_version_and_another_architecture_are_named_with_the_host():
    task = received(range)
    where = f"the executor on host {platform.node()} ({sys.executable})"
    with patch.object(dlrm, "__version__", "9.9"):
        said = refusal(task)
    own = dlrm.__version__
    assert said == f"{where} has dlrm 9.9, and the driver {own}; both need the same"
    with patch("platform.machine", return_value="riscv64"):
        said = refusal(task)
    assert said.startswith(f"{where} has architecture riscv64, and the driver {platform.machine()}")
    with patch.object(dlrm, "__version__", None):
        del dlrm.__version__
        assert "has dlrm of another project" in refusal(task)
        dlrm.__version__ = own


@pytest.mark.parametrize("name", ["dlrm", "numpy"])
def test_a_missing_package_is_named_with_ways_to_send_it(name):
    with patch.dict(sys.modules, {name: None}):
        said = refusal(received(range))
    assert f" has no module '{name}'; PYSPARK_PYTHON names the Python of the executors" in said
    assert "--py-files dlrm.zip" in said


def test_what_spark_says_of_versions_of_python_has_the_host():
    text = (
        "Lost task 0.3 in stage 0.0 (TID 3) (10.0.0.7 executor 1): PythonException: [PYTHON_VERSION"
        "_MISMATCH] Python in worker has different version: 3.10 than that in driver: 3.12, PySpark"
    )
    said = str(error_of(RuntimeError(text)))
    assert said.startswith("the executor on host 10.0.0.7 has Python 3.10, and the driver 3.12;")
    assert "PYSPARK_PYTHON" in said
    said = str(error_of(RuntimeError("Lost task 0.3: java.lang.OutOfMemoryError")))
    assert said == "Spark failed: Lost task 0.3: java.lang.OutOfMemoryError"
