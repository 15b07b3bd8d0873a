"""Runs tasks in a session of Spark without access to a JVM, as one of Spark Connect.

A task is a row of a data frame with one row a partition, on which `mapInArrow` calls it.
"""

import pickle
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm.preproc.errors import EngineError
from dlrm.preproc.execution.spark_engine import (
    DEADLINE,
    START,
    SparkEngine,
    is_on_cluster,
    quiet_errors,
    started,
    umask,
)
from dlrm.remote.uri import Uri

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PROBED_ROWS = 1 << 16  # more than there are cores


class ConnectEngine(SparkEngine):
    """Runs tasks in a session, with the umask of the process that created the engine."""

    def __init__(self, session: "SparkSession") -> None:
        self._remote, self._umask = session, umask()
        self._tag = f"dlrm-{uuid.uuid4().hex}"
        self._cores = 1
        self._active, self._ended = 0, 0
        quiet_errors()

    @property
    def cores(self) -> int:
        """Returns the number of tasks that ran at a time when the engine started."""
        return self._cores

    @property
    def address(self) -> str | None:
        """Returns None: a session does not know the address of Spark's pages."""
        return None

    def session(self) -> "SparkSession":
        """Returns the session."""
        return self._remote

    def _count_cores(self) -> int:
        """Returns the session's default parallelism, into which it divides a range."""
        parts = self._remote.range(_PROBED_ROWS).selectExpr("spark_partition_id() part")
        with self._tagged(START):
            self._cores = parts.selectExpr("max(part)").collect()[0][0] + 1
        return self._cores

    def _deadline(self) -> str:
        return self._remote.conf.get(DEADLINE, "120s") or ""

    def _is_stopped(self) -> bool:
        return False

    def start(self, folders: Sequence[Path | Uri] = (), log: Path | None = None) -> None:
        """Starts Python on every core; see `SparkEngine.start`."""
        with self._progress_noted():
            super().start(folders, log)

    @contextmanager
    def _progress_noted(self) -> Iterator[None]:
        """Keeps the numbers of running and ended tasks that the server reports within a block."""

        def note(stages: Any, inflight_tasks: int, operation_id: str, done: bool) -> None:
            self._active = 0 if done else inflight_tasks
            self._ended = sum(stage.num_completed_tasks for stage in stages or ())

        register = getattr(self._remote, "registerProgressHandler", None)
        if register is None:  # a session with a JVM that may not be used
            self._active = 1  # so that nothing is canceled that may be running
            yield
            return
        handler: Any = note
        register(handler)
        try:
            yield
        finally:
            self._remote.removeProgressHandler(handler)

    def _progress_of(self, stage: str) -> tuple[int, int]:
        return self._active, self._ended

    def _for_each(self, task: Callable[[Any], None], items: Sequence[Any]) -> Callable[[], Any]:
        from pyspark import cloudpickle

        contents, number = [cloudpickle.dumps(item) for item in items], len(items)

        def each(batches: Iterator[Any]) -> Iterator[Any]:  # nested, so it is pickled by value
            for batch in batches:
                for place in batch.column(0).to_pylist():
                    task(pickle.loads(contents[place]))
            return iter(())

        rows = self._remote.range(0, number, 1, max(number, 1))
        return lambda: rows.mapInArrow(each, "id long").collect()

    def _job(self, stage: str, act: Callable[[], Any]) -> Callable[[], Any]:
        def job() -> Any:
            with self._tagged(stage):
                return act()

        return job

    @contextmanager
    def _tagged(self, stage: str) -> Iterator[None]:
        """Gives what this thread runs a tag, by which it can be canceled."""
        self._remote.addTag(f"{self._tag}-{stage}")
        try:
            yield
        finally:
            self._remote.removeTag(f"{self._tag}-{stage}")

    def _cancel(self, stage: str) -> None:
        self._remote.interruptTag(f"{self._tag}-{stage}")


@contextmanager
def session_engine(
    session: "SparkSession", folders: Sequence[Path | Uri], say: Callable[[str], None]
) -> Iterator[SparkEngine]:
    """Runs tasks in a session of the user, which is left as it is.

    Args:
        session: a session of Spark 4, also of Spark Connect.
        folders: directories that every executor must be able to write in.

    Raises:
        EngineError: the session does not run tasks; see `SparkEngine.start`.
    """
    yield started(_engine_of(session), folders, None, say)


def shares_folders(session: "SparkSession") -> bool:
    """Returns whether a session runs its tasks in processes that see the folders of this one."""
    engine = _engine_of(session)
    return not isinstance(engine, ConnectEngine) and not is_on_cluster(session.sparkContext.master)


def _engine_of(session: "SparkSession") -> SparkEngine:
    try:
        context = session.sparkContext
        stopped = context._jsc is None or context._jsc.sc().isStopped()
    except Exception:  # Spark Connect has none, and others forbid it with errors of their own
        return ConnectEngine(session)
    if stopped:
        raise EngineError("the session of Spark has been stopped; expected a running one")
    return SparkEngine(context, session)
