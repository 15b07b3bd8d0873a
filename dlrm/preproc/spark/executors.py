"""Tasks of Spark on executors: the package that they need, and their errors."""

import gc
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from dlrm.data.transform.dictionaries import two_texts
from dlrm.preproc.errors import EngineError, TaskError
from dlrm.remote.uri import shown
from dlrm.version import __version__

_MARK, _EXECUTOR_MARK = "dlrm-task-error:", "dlrm-executor-error:"
_SEND = (
    "PYSPARK_PYTHON names the Python of the executors; spark-submit sends this package by "
    "--py-files dlrm.zip, and an environment by --archives; a session sends the package by "
    "spark.sparkContext.addPyFile or, with Spark Connect, spark.addArtifacts (preproc/README.md, "
    "Python on the executors)"
)


def sent(task: Callable, mask: int) -> Callable:
    """Returns a function for executors, which first compares its package with this one.

    As a nested function it is pickled by value, and runs where there is no package.
    """
    from pyspark import cloudpickle

    content = cloudpickle.dumps(task)

    def run(batches: Any) -> Any:
        try:
            import dlrm

            others = f"has dlrm {dlrm.__version__}, and the driver {__version__}"
            problem = "" if dlrm.__version__ == __version__ else others
        except ModuleNotFoundError as error:
            problem = f"has no module {error.name!r}; {_SEND}"
        if problem:
            host = f"the executor on host {os.uname().nodename} ({sys.executable})"
            raise RuntimeError(f"{_EXECUTOR_MARK}{host} {problem}{_EXECUTOR_MARK}")
        from dlrm.preproc.spark.executors import guarded

        return guarded(pickle.loads(content), mask, batches)

    return run


def guarded(task: Callable, mask: int, batches: Any) -> Iterator[Any]:
    """Runs a task with the driver's umask; marks its errors, with the host if a file failed."""
    os.umask(mask)
    gc.freeze()  # what is loaded: Spark collects garbage after each task, which would take 40 ms
    try:
        yield from task(batches)
    except (OSError, ValueError) as error:
        where = f" (on host {os.uname().nodename} as user {os.geteuid()})"
        where = where if isinstance(error, OSError) else ""
        raise RuntimeError(f"{_MARK}{shown(str(error))}{where}{_MARK}") from None


def error_of(error: BaseException) -> Exception:
    """Returns the error of a task that an error of Spark has, or else Spark's causes, in a line."""
    text = str(error)
    for mark, kind in ((_MARK, TaskError), (_EXECUTOR_MARK, EngineError)):
        if said := re.search(f"{mark}(.*?){mark}", text, re.DOTALL):
            return kind(said[1])
    if said := re.search(r"hash of (\w*) and (\w*)", text):
        return TaskError(two_texts(*map(bytes.fromhex, said.groups())))
    named = r"^(?:Caused by: |: )?((?:[\w.$]+\.)?\w*(?:Error|Exception): ?.*)"
    causes: list[str] = []
    for cause in re.findall(named, text, re.MULTILINE):
        cause = cause.removesuffix("Traceback (most recent call last):").strip()
        if not any(cause.partition(": ")[2] in earlier for earlier in causes):
            causes.append(cause)
    first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return EngineError(f"Spark failed: {'; '.join(causes) or first}")
