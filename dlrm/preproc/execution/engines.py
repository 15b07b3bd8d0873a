"""Engines that run tasks: processes of this machine, threads, or Spark (see `spark_engine`)."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    FIRST_EXCEPTION,
    Executor,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from dlrm.data.workers import end_processes, process_pool

_ATTEMPTS = 3


class TaskError(RuntimeError):
    """A task failed on its input or its output; the message is the task's own."""


class EngineError(RuntimeError):
    """Tasks could not be run: Spark is missing, or a process was killed repeatedly."""


class Engine(Protocol):
    """Runs tasks.

    Attributes:
        is_distributed: whether tasks may run on other machines.
    """

    is_distributed: bool

    @property
    def cores(self) -> int:
        """Returns the number of tasks that run at a time."""

    def run(self, stage: str, task: Callable[[Any], None], items: Sequence[Any]) -> None:
        """Calls a task with every item, in any order, possibly more than once.

        Raises:
            TaskError: a task raised a ValueError or OSError.
            EngineError: tasks could not be run.
        """


class LocalEngine:
    """Runs tasks in processes of this machine, without Spark and Java."""

    is_distributed = False

    def __init__(self, cores: int, pool: ProcessPoolExecutor) -> None:
        self.cores, self._pool = cores, pool

    def run(self, stage: str, task: Callable[[Any], None], items: Sequence[Any]) -> None:
        """Calls a task with every item; see `Engine`."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                _run_once(self._pool, task, items)
                return
            except (ValueError, OSError) as error:
                raise TaskError(str(error)) from error
            except BrokenProcessPool as error:
                if attempt == _ATTEMPTS:
                    raise EngineError(
                        f"{stage}: a process was killed {_ATTEMPTS} times, as by a kernel that ran "
                        "out of memory; fewer --cores or smaller --split_bytes need less"
                    ) from error
                self._pool = process_pool(self.cores)

    def stop(self) -> None:
        """Ends the processes, whatever they do."""
        end_processes(self._pool)


def return_memory() -> None:
    """Makes Arrow return memory, here and in processes started from now on.

    Its default pool, mimalloc, reserves 1 GiB and keeps freed memory: 50 MB more per process. In
    copies of a process it also takes twice as long in the kernel. The user's choice takes
    precedence.
    """
    if "ARROW_DEFAULT_MEMORY_POOL" not in os.environ:
        os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"
        if (arrow := sys.modules.get("pyarrow")) is not None:
            arrow.set_memory_pool(arrow.system_memory_pool())


class _NoPandas:
    """A finder of modules that finds no pandas."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)


def skip_pandas() -> None:
    """Keeps Arrow from importing pandas in this process and its copies, which takes 0.3 s.

    Arrow looks for pandas at the first list that becomes an array, and remembers that there is
    none. Nothing changes if the program has imported it.
    """
    import numpy as np
    import pyarrow as pa

    sys.meta_path.insert(0, _NoPandas)  # type: ignore[arg-type]
    try:
        pa.array([0])
        pa.array(np.zeros(1))  # imports numpy.ma, which copies then have
    finally:
        sys.meta_path.remove(_NoPandas)  # type: ignore[arg-type]


@contextmanager
def local_engine(cores: int, forked: bool = False) -> Iterator[LocalEngine]:
    """Starts one process per core, and ends them with the block, or with this process."""
    return_memory()
    pool = process_pool(cores, forked)
    for _ in range(cores):
        pool.submit(os.getpid)  # starts a process, whose imports overlap with ours
    engine = LocalEngine(cores, pool)
    try:
        yield engine
    finally:
        engine.stop()


class ThreadEngine:
    """Runs tasks in threads of this process.

    It starts no process, so a program that calls the library needs no `if __name__ == "__main__"`,
    and imports nothing again. Most of the work is in NumPy and Arrow, which run in parallel.
    """

    is_distributed = False

    def __init__(self, cores: int, pool: ThreadPoolExecutor) -> None:
        self.cores, self._pool = cores, pool

    def run(self, stage: str, task: Callable[[Any], None], items: Sequence[Any]) -> None:
        """Calls a task with every item; see `Engine`."""
        try:
            _run_once(self._pool, partial(_tried, task), items)
        except (ValueError, OSError) as error:
            raise TaskError(str(error)) from error


def _tried(task: Callable[[Any], None], item: Any) -> None:
    """Calls a task, and repeats it if Python fails to open NumPy arrays in two threads at once.

    Before 3.11.8 its parser then raises SystemError now and then (python/cpython#106905).
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return task(item)
        except SystemError:
            continue
    return task(item)


@contextmanager
def thread_engine(cores: int) -> Iterator[ThreadEngine]:
    """Starts one thread per core, and waits for their tasks at the end of the block."""
    pool = ThreadPoolExecutor(cores)
    try:
        yield ThreadEngine(cores, pool)
    finally:
        pool.shutdown(cancel_futures=True)


def _run_once(pool: Executor, task: Callable[[Any], None], items: Sequence[Any]) -> None:
    """Calls a task with every item; after an error the pool's end cancels those that wait.

    To cancel one here would make the pool's own thread print a traceback if processes die.
    """
    done, _ = wait([pool.submit(task, item) for item in items], return_when=FIRST_EXCEPTION)
    for future in done:
        future.result()
