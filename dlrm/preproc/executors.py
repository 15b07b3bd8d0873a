"""Tasks of Spark on executors: their files, a comparison with the driver, and their errors."""

import gc
import os
import pickle
import platform
import pwd
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from dlrm import __version__
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

    def adopt(self, paths: Iterable[str | Path]) -> None:
        """Has files that tasks have written."""

    def adopt_new(self) -> None:
        """Has the files that packed items name and that were not there."""

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


def sent(task: Callable, context: tuple[int, tuple[str, str]]) -> Callable:
    """Returns a function for executors, which first compares its package with this one.

    As a nested function it is pickled by value, and runs where there is no package.
    """
    from pyspark import cloudpickle

    content, mark, send, version = cloudpickle.dumps(task), _EXECUTOR_MARK, _SEND, __version__
    machine = platform.machine()

    def run(batches: Any) -> Any:
        import os
        import pickle
        import platform
        import sys

        def fail(problem: str) -> None:
            host = f"the executor on host {os.uname().nodename} ({sys.executable})"
            raise RuntimeError(f"{mark}{host} {problem}{mark}") from None

        if platform.machine() != machine:
            fail(f"has architecture {platform.machine()}, and the driver {machine}")
        try:
            import numpy  # noqa: F401, ICN001

            import dlrm
        except ModuleNotFoundError as error:
            fail(f"has no module {error.name!r}; {send}")
        if (found := getattr(dlrm, "__version__", "of another project")) != version:
            fail(f"has dlrm {found}, and the driver {version}; both need the same")
        from dlrm.preproc.executors import guarded

        return guarded(pickle.loads(content), context, batches)

    return run


def guarded(task: Callable, context: tuple[int, tuple[str, str]], batches: Any) -> Iterator[Any]:
    """Runs a task with the driver's umask; marks its errors of input and output, with a place."""
    mask, driver = context
    os.umask(mask)
    try:
        yield from task(batches)
    except (ValueError, OSError) as error:
        where, (host, user) = "", host_and_user()
        if isinstance(error, OSError) and (host, user) != driver:
            unseen = "; not seen by this node" * isinstance(error, FileNotFoundError)
            where = f" (on host {host} as user {user}{unseen})"
        raise RuntimeError(f"{_MARK}{error}{where}{_MARK}") from None
    finally:
        _freeze_loaded(len(sys.modules))


@cache
def _freeze_loaded(modules: int) -> None:
    """Excludes loaded modules from the garbage collection after every task, which takes 40 ms."""
    gc.collect()
    gc.freeze()


def host_and_user() -> tuple[str, str]:
    with suppress(KeyError):  # as in containers
        return os.uname().nodename, pwd.getpwuid(os.geteuid()).pw_name
    return os.uname().nodename, str(os.geteuid())


def error_of(error: BaseException) -> Exception:
    """Returns the error of a task that an error of Spark has, or else Spark's causes, in a line."""
    text = str(error)
    if said := re.search(f"{_MARK}(.*?){_MARK}", text, re.DOTALL):
        return TaskError(said[1])
    if said := re.search(f"{_EXECUTOR_MARK}(.*?){_EXECUTOR_MARK}", text, re.DOTALL):
        return EngineError(said[1])
    versions = re.search(r"different version: (\d+\.\d+) than that in driver: (\d+\.\d+)", text)
    if versions is not None:  # which Spark compares before it reads a task
        host = re.search(r"\(TID \d+\) \((\S+) executor", text)
        where = f"the executor on host {host[1]}" if host else "an executor"
        return EngineError(
            f"{where} has Python {versions[1]}, and the driver {versions[2]}; both need the same: "
            "PYSPARK_PYTHON or --conf spark.pyspark.python names that of the executors"
        )
    named = r"^(?:Caused by: |: )?((?:[\w.$]+\.)?\w*(?:Error|Exception): ?.*)"
    causes: list[str] = []
    for cause in re.findall(named, text, re.MULTILINE):
        cause = cause.removesuffix("Traceback (most recent call last):").strip()
        if not any(cause.partition(": ")[2] in earlier for earlier in causes):
            causes.append(cause)
    first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return EngineError(f"Spark failed: {'; '.join(causes) or first}")
