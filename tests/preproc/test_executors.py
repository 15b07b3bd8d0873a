"""Tasks compare their executor with the driver before they begin."""

import pickle
import platform
import sys
from unittest.mock import patch

import pytest

import dlrm
from dlrm.preproc.execution.executors import checked, executor_error

cloudpickle = pytest.importorskip("pyspark.cloudpickle")


def sent(task):
    """Returns a task as an executor receives it."""
    return pickle.loads(cloudpickle.dumps(checked(task)))


def refusal(task):
    with pytest.raises(RuntimeError) as raised:
        task(1)
    return executor_error(f"Traceback:\n{raised.value}\nCaused by: others")


def test_a_task_runs_on_an_executor_like_the_driver(tmp_path):
    sent(tmp_path.joinpath("made").mkdir)(0o700)
    assert (tmp_path / "made").is_dir()
    with pytest.raises(ZeroDivisionError):
        sent(lambda item: item / 0)(1)


def test_another_version_and_another_architecture_are_named_with_the_host():
    task = sent(print)
    where = f"the executor on host {platform.node()} ({sys.executable})"
    with patch.object(dlrm, "__version__", "9.9"):
        said = refusal(task)
    own = dlrm.__version__
    assert said == f"{where} has dlrm 9.9, and the driver {own}; both need the same"
    with patch("platform.machine", return_value="riscv64"):
        said = refusal(task)
    assert said.startswith(f"{where} has architecture riscv64, and the driver {platform.machine()}")
    with patch.object(sys, "version_info", (3, 99, 0)):
        assert refusal(task).startswith(f"{where} has Python 3.99, and the driver 3.")
    with patch.object(dlrm, "__version__", None):
        del dlrm.__version__
        assert "has dlrm of another project" in refusal(task)
        dlrm.__version__ = own


@pytest.mark.parametrize("name", ["dlrm", "numpy", "pyarrow"])
def test_a_missing_package_is_named_with_ways_to_send_it(name):
    with patch.dict(sys.modules, {name: None}):
        said = refusal(sent(print))
    assert f" has no module '{name}'; PYSPARK_PYTHON names the Python of the executors" in said
    assert "--py-files dlrm.zip" in said


def test_what_spark_says_of_versions_of_python_has_the_host():
    text = (
        "Lost task 0.3 in stage 0.0 (TID 3) (10.0.0.7 executor 1): PythonException: [PYTHON_VERSION"
        "_MISMATCH] Python in worker has different version: 3.10 than that in driver: 3.12, PySpark"
    )
    said = executor_error(text)
    assert said.startswith("the executor on host 10.0.0.7 has Python 3.10, and the driver 3.12;")
    assert "PYSPARK_PYTHON" in said
    assert executor_error("Lost task 0.3: java.lang.OutOfMemoryError") is None
