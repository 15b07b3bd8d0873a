"""Checks that executors of Spark can run this package's tasks: its version, Python, architecture.

The check comes before the task in every stage. It is sent by value, so it also runs where there is
no package.
"""

import platform
import re
import sys
from collections.abc import Callable
from typing import Any

from dlrm import __version__

_MARK = "dlrm-executor-error:"
_NEEDED = ("numpy", "pyarrow", "dlrm")
_SEND = (
    "PYSPARK_PYTHON names the Python of the executors; spark-submit sends this package by "
    "--py-files dlrm.zip, and an environment by --archives; a session sends the package by "
    "spark.sparkContext.addPyFile or, with Spark Connect, spark.addArtifacts (preproc/README.md, "
    "Python on the executors)"
)


def checked(task: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a task that first compares its executor with this process.

    Its errors are recognized by `executor_error`.
    """
    from pyspark import cloudpickle

    content, mark, send, needed = cloudpickle.dumps(task), _MARK, _SEND, _NEEDED
    expected = {
        "Python": ".".join(map(str, sys.version_info[:2])),
        "architecture": platform.machine(),
        "dlrm": __version__,
    }

    def run(item: Any) -> Any:  # as a nested function, it is pickled by value
        import importlib
        import os
        import pickle
        import platform
        import sys

        def fail(problem: str) -> None:
            host = f"the executor on host {os.uname().nodename} ({sys.executable})"
            raise RuntimeError(f"{mark}{host} {problem}{mark}") from None

        def compare(name: str, found: str) -> None:
            if found != expected[name]:
                fail(f"has {name} {found}, and the driver {expected[name]}; both need the same")

        compare("Python", ".".join(map(str, sys.version_info[:2])))
        compare("architecture", platform.machine())
        try:
            *_, package = [importlib.import_module(name) for name in needed]
            compare("dlrm", getattr(package, "__version__", "of another project"))
            return pickle.loads(content)(item)
        except ModuleNotFoundError as error:
            fail(f"has no module {error.name!r}; {send}")

    return run


def executor_error(text: str) -> str | None:
    """Returns the message of an error of Spark that an executor's environment causes, or None."""
    if said := re.search(f"{_MARK}(.*?){_MARK}", text, re.DOTALL):
        return said[1]
    # Spark itself compares versions of Python, before it reads a task.
    versions = re.search(r"different version: (\d+\.\d+) than that in driver: (\d+\.\d+)", text)
    if versions is None:
        return None
    host = re.search(r"\(TID \d+\) \((\S+) executor", text)
    where = f"the executor on host {host[1]}" if host else "an executor"
    return (
        f"{where} has Python {versions[1]}, and the driver {versions[2]}; both need the same: "
        "PYSPARK_PYTHON or --conf spark.pyspark.python names that of the executors"
    )
