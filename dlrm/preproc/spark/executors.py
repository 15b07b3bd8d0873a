"""Tasks of Spark on executors: their files, the package that they need, and their errors."""

import gc
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from dlrm import __version__
from dlrm.data.transform.dictionaries import two_texts
from dlrm.preproc.errors import EngineError, TaskError
from dlrm.remote.uri import Uri

_MARK, _EXECUTOR_MARK = "dlrm-task-error:", "dlrm-executor-error:"
_SEND = (
    "PYSPARK_PYTHON names the Python of the executors; spark-submit sends this package by "
    "--py-files dlrm.zip, and an environment by --archives; a session sends the package by "
    "spark.sparkContext.addPyFile or, with Spark Connect, spark.addArtifacts (preproc/README.md, "
    "Python on the executors)"
)


class LocalFiles:
    """Files of a machine, or of a folder that all machines have: tasks use the same paths."""

    @staticmethod
    @contextmanager
    def opened(*inputs: Any) -> Iterator[Callable[[bytes], Any]]:
        """Yields what unpacks tasks."""
        yield pickle.loads

    def pack(self, task: Any) -> tuple[bytes, Mapping[str, Any]]:
        """Returns what `opened` makes the task of, and the input that it names."""
        from pyspark import cloudpickle

        return cloudpickle.dumps(task), {}

    def adopt_new(self) -> None:
        """Has outlines of the files that tasks have written."""

    def folder(self, path: Path) -> Path | Uri:
        """Returns where executors write what belongs into a folder."""
        return path


def each(
    opened: Callable,
    make: bytes,
    common: Any,
    items: Sequence[Any],
    batches: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Calls a function with the number of each row, and the item of this number."""
    for batch in batches:
        for number in batch.column(0).to_pylist():
            content, inputs = items[number]
            try:
                with opened(common, inputs) as loads:
                    yield from loads(make)(number, loads(content))
            except ValueError:
                if not inputs:
                    raise
                # Once more with whole files, as the message has the number of a line.
                with opened(common, {name: one.whole for name, one in inputs.items()}) as loads:
                    yield from loads(make)(number, loads(content))


def opened_task(
    opened: Callable, task: bytes, inputs: Any, batches: Iterable[pa.RecordBatch]
) -> Iterator[Any]:
    with opened(inputs) as loads:
        yield from loads(task)(batches)


def sent(task: Callable, mask: int) -> Callable:
    """Returns a function for executors, which first compares its package with this one.

    As a nested function it is pickled by value, and runs where there is no package.
    """
    from pyspark import cloudpickle

    content, mark, send, version = cloudpickle.dumps(task), _EXECUTOR_MARK, _SEND, __version__

    def run(batches: Any) -> Any:
        import os
        import pickle
        import sys

        host = f"the executor on host {os.uname().nodename} ({sys.executable})"
        try:
            import dlrm
        except ModuleNotFoundError as error:
            problem = f"{host} has no module {error.name!r}; {send}"
            raise RuntimeError(f"{mark}{problem}{mark}") from None
        if dlrm.__version__ != version:
            problem = f"{host} has dlrm {dlrm.__version__}, and the driver {version}"
            raise RuntimeError(f"{mark}{problem}{mark}")
        from dlrm.preproc.spark.executors import guarded

        return guarded(pickle.loads(content), mask, batches)

    return run


def guarded(task: Callable, mask: int, batches: Any) -> Iterator[Any]:
    """Runs a task with the driver's umask; marks its errors of input and output, with a place."""
    os.umask(mask)
    gc.freeze()  # what is loaded: Spark collects garbage after each task, which would take 40 ms
    try:
        yield from task(batches)
    except OSError as error:
        where = f"on host {os.uname().nodename} as user {os.geteuid()}"
        raise RuntimeError(f"{_MARK}{error} ({where}){_MARK}") from None
    except ValueError as error:
        raise RuntimeError(f"{_MARK}{error}{_MARK}") from None


def error_of(error: BaseException) -> Exception:
    """Returns the error of a task that an error of Spark has, or else Spark's causes, in a line."""
    text = str(error)
    if said := re.search(f"{_MARK}(.*?){_MARK}", text, re.DOTALL):
        return TaskError(said[1])
    if said := re.search(f"{_EXECUTOR_MARK}(.*?){_EXECUTOR_MARK}", text, re.DOTALL):
        return EngineError(said[1])
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
