"""Sums and sorts with DuckDB what processes or threads of this machine make of parts."""

import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from dlrm.data.transform.dictionaries import two_texts
from dlrm.data.workers import end_processes, process_pool
from dlrm.files import errors_named
from dlrm.machine import host_memory
from dlrm.preproc.engine import COUNTS, ROWS, Span
from dlrm.preproc.errors import EngineError, TaskError
from dlrm.preproc.packing import Files, Layout, PackJob
from dlrm.preproc.work_folder import WorkFolder
from dlrm.variables import return_memory

_ATTEMPTS = 3
_BATCH_ROWS = 1 << 16
_SHARE = 0.5  # of the free memory, for DuckDB
_LEAST_MEMORY = 256 << 20
_GROUPED = """
    SELECT "column", key, if(min(text) <> max(text), error(
            'hash of ' || hex(min(text)) || ' and ' || hex(max(text))
        ), min(text)) AS text, sum(n)::BIGINT AS n
    FROM given GROUP BY "column", key
"""
# A second grouping leaves of the rare values of a column only their number, so that they are not
# sorted. Facts about parts, whose column is -1, are kept.
_FREQUENT = f"""
    SELECT "column", if(n > 0, key, count(*)::UBIGINT) AS key, text, n FROM (
        SELECT "column", if(n < least, NULL, key) AS key, if(n < least, NULL, text) AS text,
            if(n < least, 0, n) AS n
        FROM (SELECT *, $limits["column" + 2] AS least FROM ({_GROUPED}))
    ) GROUP BY "column", key, text, n
"""
# Texts in the order make sorting several times as slow, even where there are none.
_IN_ORDER = 'SELECT "column", key, text, n FROM ({}) ORDER BY "column", n DESC, {}key'
_SORTED = 'SELECT split, key, "row" FROM given ORDER BY split, key'


class DuckDbEngine:
    """An engine of one machine; see `dlrm.preproc.engine.Engine`.

    Args:
        start: starts what runs the functions: processes, or threads.
        cores: number of calls at a time, and of threads of DuckDB.
        folder: directory for what DuckDB spills; None is that of the system.
        memory: bytes that DuckDB may use; None is a share of what is free.
    """

    is_distributed = False

    def __init__(
        self,
        start: Callable[[], Executor],
        cores: int,
        folder: Path | None = None,
        memory: int | None = None,
    ) -> None:
        self._start, self._pool, self.cores = start, start(), cores
        self._spill = str(folder or tempfile.gettempdir())
        free = (host_memory() or (8 << 30, 0))[0]
        self._memory = memory or max(int(_SHARE * free), _LEAST_MEMORY)

    def map(self, task: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        """Yields results in the order of their items; see `Engine`."""
        results = dict(self._results(task, items))
        yield from (results[number] for number in range(len(items)))

    def counts(
        self,
        parts: Sequence[Any],
        partial_counts: Callable[[Any], Iterator[pa.RecordBatch]],
        limits: Sequence[int],
        has_texts: bool,
        on_part: Callable[[int], None],
    ) -> Iterator[pa.RecordBatch]:
        """Yields the sums of counts; see `Engine`."""
        given = self._batches(partial_counts, parts, on_part, COUNTS)
        sums, values = _GROUPED, dict[str, Any]()
        if max(limits, default=1) > 1:
            sums, values = _FREQUENT, {"limits": [1, *limits]}
        query = _IN_ORDER.format(sums, "text, " * has_texts)
        yield from self._query(query, COUNTS, given, values)

    def sorted_rows(
        self,
        parts: Sequence[Any],
        packed_rows: Callable[[Any], Iterator[pa.RecordBatch]],
        spans: Sequence[Span],
        write: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]],
        on_part: Callable[[int], None],
    ) -> Iterator[pa.RecordBatch]:
        """Yields what is made of rows in their order; see `Engine`."""
        given = self._batches(packed_rows, parts, on_part, ROWS)
        yield from write(self._query(_SORTED, ROWS, given, {}))

    def writer(self, job: PackJob, layouts: Sequence[Layout], work: WorkFolder) -> Files:
        """Returns the files of a dataset; see `Engine`."""
        return Files(work.output, layouts)

    def _batches(
        self,
        function: Callable[[Any], Iterator[pa.RecordBatch]],
        parts: Sequence[Any],
        on_part: Callable[[int], None],
        schema: pa.Schema,
    ) -> Iterator[pa.RecordBatch]:
        if not isinstance(self._pool, ProcessPoolExecutor):
            for number, batches in self._results(partial(_listed, function), parts):
                on_part(number)
                yield from batches
            return
        task = partial(_filed, function, self._spill, schema)
        for number, path in self._results(task, parts):
            on_part(number)
            with pa.memory_map(path) as file:
                os.unlink(path)
                yield from pa.ipc.open_stream(file)

    def _results(
        self, function: Callable[[Any], Any], items: Sequence[Any]
    ) -> Iterator[tuple[int, Any]]:
        """Yields numbers of items and their results as they come, a few ahead."""
        left, attempts = list(enumerate(items))[::-1], 0
        running: dict[Future, tuple[int, Any]] = {}
        while left or running:
            try:
                while left and len(running) <= self.cores:
                    running[self._pool.submit(_tried, function, left[-1][1])] = left[-1]
                    left.pop()
                with errors_named(self._spill):
                    done = wait(running, return_when=FIRST_COMPLETED).done
                    if any(isinstance(future.exception(), ValueError | OSError) for future in done):
                        done = wait(running).done  # the error is that of the first bad item
                    for future in sorted(done, key=lambda one: running[one][0]):
                        result = future.result()
                        yield running.pop(future)[0], result
            except (ValueError, OSError) as error:
                raise TaskError(str(error)) from error
            except BrokenProcessPool as error:
                attempts += 1
                if attempts == _ATTEMPTS:
                    raise EngineError(
                        f"a process was killed {_ATTEMPTS} times, as by a kernel that ran out of "
                        "memory; fewer --cores, or a smaller --memory or --split_bytes need less"
                    ) from error
                left += [*running.values()][::-1]
                running.clear()
                self._pool = self._start()

    def _query(
        self, query: str, schema: pa.Schema, given: Iterator[Any], values: dict[str, Any]
    ) -> Iterator[pa.RecordBatch]:
        errors: list[BaseException] = []

        def noted() -> Iterator[pa.RecordBatch]:
            try:
                yield from given
            except BaseException as error:
                errors.append(error)
                raise

        settings: dict[str, Any] = {
            "threads": self.cores,
            "memory_limit": f"{self._memory}B",
            "temp_directory": self._spill,
            "max_temp_directory_size": "1000TB",  # of which a full disk has its own error
            "preserve_insertion_order": False,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "arrow_large_buffer_size": True,
        }
        with duckdb.connect(config=settings) as connection:
            connection.register("given", pa.RecordBatchReader.from_batches(schema, noted()))
            try:
                with _handlers_heard() as raised:
                    yield from connection.sql(query, params=values).to_arrow_reader(_BATCH_ROWS)
            except RuntimeError as error:  # "Query interrupted"
                raise next(iter(raised), error) from None
            except duckdb.Error as error:
                if errors:
                    raise errors[0] from None
                raise TaskError(self._explained(error)) from error

    def _explained(self, error: duckdb.Error) -> str:
        """Returns an error of DuckDB in one line."""
        message = str(error).partition("\n")[0]
        if isinstance(error, duckdb.OutOfMemoryException):
            return (
                f"sums and sorting need more than {self._memory / 1e6:.0f} MB on {self.cores} "
                "cores; expected a larger --memory, or fewer --cores"
            )
        if texts := re.search(r"hash of (\w*) and (\w*)$", message):
            return two_texts(*map(bytes.fromhex, texts.groups()))
        return message.partition("Error: ")[2] or message

    def stop(self) -> None:
        """Ends the processes or threads."""
        if isinstance(self._pool, ProcessPoolExecutor):
            end_processes(self._pool)
        else:
            self._pool.shutdown(cancel_futures=True)


@contextmanager
def _handlers_heard() -> Iterator[list[BaseException]]:
    """Yields what handlers of signals raise within the block, of which DuckDB tells nothing."""
    raised: list[BaseException] = []
    if threading.current_thread() is not threading.main_thread():
        yield raised
        return

    def heard(handler: Any, *how: Any) -> None:
        try:
            handler(*how)
        except BaseException as error:
            raised.append(error)
            raise

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: handler for number, handler in before.items() if callable(handler)}
    try:
        for number, handler in before.items():
            signal.signal(number, partial(heard, handler))
        yield raised
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listed(function: Callable[[Any], Iterator[pa.RecordBatch]], part: Any) -> list[Any]:
    return list(function(part))


def _filed(
    function: Callable[[Any], Iterator[pa.RecordBatch]], folder: str, schema: pa.Schema, part: Any
) -> str:
    """Writes the batches of a part to a file, which others map; returns its path.

    A process that ends while it writes to the pipe of a pool would block the others.
    """
    descriptor, path = tempfile.mkstemp(".arrow", dir=folder)
    with open(descriptor, "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for batch in function(part):
            writer.write_batch(batch)
    return path


def _tried(function: Callable[[Any], Any], item: Any) -> Any:
    """Calls a function, and repeats it if Python fails to open NumPy arrays in threads at once.

    Before 3.11.8 its parser then raises SystemError now and then (python/cpython#106905).
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return function(item)
        except SystemError:
            continue
    return function(item)


@contextmanager
def local_engine(
    cores: int, folder: Path | None = None, memory: int | None = None, forked: bool = False
) -> Iterator[DuckDbEngine]:
    """Starts one process per core, and ends them with the block, or with this process."""
    return_memory()
    engine = DuckDbEngine(partial(_started, cores, forked), cores, folder, memory)
    try:
        yield engine
    finally:
        engine.stop()


def _started(cores: int, forked: bool) -> Executor:
    pool = process_pool(cores, forked)
    for _ in range(cores):
        with suppress(BrokenProcessPool):  # which the first task notices, too
            pool.submit(os.getpid)  # starts a process, whose imports overlap with ours
    return pool


@contextmanager
def thread_engine(cores: int, folder: Path | None = None) -> Iterator[DuckDbEngine]:
    """Starts one thread per core, and waits for their tasks at the end of the block.

    It starts no process, so a program that calls the library needs no `if __name__ == "__main__"`,
    and imports nothing again. Most of the work is in NumPy and Arrow, which run in parallel.
    """
    engine = DuckDbEngine(partial(ThreadPoolExecutor, cores), cores, folder)
    try:
        yield engine
    finally:
        engine.stop()


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
