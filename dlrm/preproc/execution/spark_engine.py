"""Runs tasks on Spark, which schedules them on this machine or a cluster and retries failures.

Rows and counts do not pass through Spark: tasks read the logs and write files, on storage that
every node mounts at the same path, so Spark converts, sorts and keeps nothing.
"""

import gc
import importlib
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm.locks import OwnedDirectory, remove_abandoned
from dlrm.preproc.execution.engines import EngineError, TaskError, return_memory

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

_MARK = "dlrm-task-error:"
_JVM = "-XX:+IgnoreUnrecognizedVMOptions -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
# These save 50 of the 80 ms of an empty task on 2 cores with Spark 4.3. The JVM only schedules, so
# its optimizing compiler would take cores from the tasks; and over TCP a task waits 40 ms for the
# acknowledgement of a small packet. Other clusters have their own settings, and YARN's directories
# have names that are too long for a socket.
_OWN_CLUSTER = {
    "spark.driver.defaultJavaOptions": _JVM,
    "spark.executor.defaultJavaOptions": _JVM,
    "spark.python.unix.domain.socket.enabled": "true",  # from Spark 4.1 on
    # Otherwise late executors would start while others already run the first stage.
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",  # of spark.cores.max
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "15s",
}


class SparkEngine:
    """Runs tasks on a Spark context."""

    def __init__(self, spark: "SparkContext") -> None:
        self._spark = spark

    @property
    def cores(self) -> int:
        """Returns the number of tasks that run at a time."""
        return max(self._spark.defaultParallelism, 1)

    @property
    def address(self) -> str | None:
        """Returns the address of Spark's own pages, if they are enabled."""
        return self._spark.uiWebUrl

    def session(self) -> "SparkSession":
        """Returns the session, which reads tables and writes times to Parquet in UTC."""
        from pyspark.sql import SparkSession

        # Errors are raised as well, and need not be printed as JSON.
        logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
        session = SparkSession(self._spark)
        session.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        return session

    def run(self, stage: str, task: Callable[[Any], None], items: Sequence[Any]) -> None:
        """Calls a task with every item; see `dlrm.preproc.execution.engines.Engine`."""
        self._spark.setJobGroup(stage, stage)
        with _failures():
            self._spark.parallelize(items, max(len(items), 1)).foreach(_named(task))


def _nothing(_: int) -> None:
    """A task that only starts a process."""


class _named:  # noqa: N801  (used as a function)
    """A task whose errors of input and output differ from Spark's own."""

    def __init__(self, task: Callable[[Any], None]) -> None:
        self.task = task

    def __call__(self, item: Any) -> None:
        _freeze_what_is_loaded()
        try:
            self.task(item)
        except (ValueError, OSError) as error:
            raise RuntimeError(f"{_MARK}{error}{_MARK}") from None


@cache
def _freeze_what_is_loaded() -> None:
    """Excludes loaded modules from the garbage collection after every Spark task.

    It would take 25 ms, for pyspark's modules alone.
    """
    importlib.import_module("dlrm.preproc.stages.tasks")
    gc.collect()
    gc.freeze()


@contextmanager
def _failures() -> Iterator[None]:
    """Turns Spark's errors into one line: the task's message, otherwise Spark's cause."""
    from py4j.protocol import Py4JError

    try:
        yield
    except Py4JError as error:
        text = str(error)
        if said := re.search(f"{_MARK}(.*?){_MARK}", text, re.DOTALL):
            raise TaskError(said[1]) from None
        named = r"^(?:Caused by: |: )?((?:[\w.$]+\.)?\w*(?:Error|Exception)): ?(.*)"
        causes = re.findall(named, text, re.MULTILINE)
        cause = ": ".join(causes[-1]) if causes else text.splitlines()[0]
        raise EngineError(f"Spark failed: {cause}") from error


@contextmanager
def spark_engine(
    master: str | None,
    memory_gib: int,
    log: Path | None = None,
    settings: dict[str, str] | None = None,
) -> Iterator[SparkEngine]:
    """Starts Spark and stops it at the end.

    Args:
        master: "local[N]" or the address of a cluster; None: that of `spark-submit`.
        memory_gib: total memory, and on a cluster that of the driver and of each executor; half is
            for the JVM, half for Python's workers.
        log: file for the JVM's output, instead of the terminal.
        settings: Spark's own settings, which take precedence.

    Raises:
        EngineError: pyspark is not installed, or Spark does not start.
    """
    try:
        from pyspark import SparkConf, SparkContext
        from pyspark.errors import PySparkException
    except ImportError as error:
        raise EngineError(
            f"{sys.executable} has no pyspark ({error}); install it with: "
            f"{sys.executable} -m pip install 'pyspark>=4,<5'"
        ) from error
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    os.environ["PYTHONPATH"] = path
    return_memory()
    logging.getLogger("py4j").setLevel(logging.WARNING)  # absl would print its messages
    conf = SparkConf().setAppName("dlrm preprocessing")
    if master is not None:
        conf.setMaster(master)
    conf.setAll(list(configuration(master, memory_gib, path, settings or {}).items()))
    try:
        with own_local_folders():
            with _standard_error_to(log), _failures():
                spark = SparkContext(conf=conf)
            try:
                engine = SparkEngine(spark)
                # Starts Python's processes, which report missing packages before any work.
                engine.run("start", _nothing, range(engine.cores))
                yield engine
            finally:
                _stop(spark)
    except PySparkException as error:
        raise EngineError(f"Spark did not start: {error}; see {log}") from error
    except EngineError as error:
        raise EngineError(f"{error}; see {log}") from error


def configuration(
    master: str | None, memory_gib: int, python_path: str, settings: dict[str, str]
) -> dict[str, str]:
    """Returns Spark's settings for the arguments of `spark_engine`; `settings` take precedence."""
    memory = f"{max(memory_gib // 2, 1)}g"
    if re.fullmatch(r"local(\[.*\])?", master or ""):
        place = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    else:
        place = {"spark.executor.memory": memory}
    return {
        "spark.driver.memory": memory,
        "spark.executorEnv.PYTHONPATH": python_path,
        "spark.executorEnv.ARROW_DEFAULT_MEMORY_POOL": os.environ.get(
            "ARROW_DEFAULT_MEMORY_POOL", "system"
        ),
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_log4j()}",
        **place,
        **(_OWN_CLUSTER if re.match("local|spark://", master or "") else {}),
        **settings,
    }


def _stop(spark: "SparkContext") -> None:
    """Stops Spark and its JVM, which removes its last temporary files on exit."""
    gateway = spark._gateway
    assert gateway is not None  # present once a SparkContext has started
    spark.stop()
    if gateway.proc is None:
        return  # spark-submit started the JVM, and ends it
    gateway.shutdown()
    gateway.proc.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        gateway.proc.wait(timeout=30)
    type(spark)._gateway = type(spark)._jvm = None  # so that another Spark can start


@contextmanager
def own_local_folders() -> Iterator[None]:
    """Gives Spark a directory of this process in each of SPARK_LOCAL_DIRS, and removes it later.

    It first removes those of killed processes of this machine. A directory of SPARK_LOCAL_DIRS that
    this or a killed process created is removed as well if it is empty.
    """
    given = os.environ.get("SPARK_LOCAL_DIRS")
    if not given:
        yield
        return
    prefix = f".dlrm-spark-{os.uname().nodename}-"
    own: list[OwnedDirectory] = []
    made = []
    for folder in map(Path, filter(None, given.split(","))):
        if remove_abandoned(folder, prefix) or not os.path.lexists(folder):
            made.append(folder)
        folder.mkdir(parents=True, exist_ok=True)
        own.append(OwnedDirectory(folder, prefix))
    os.environ["SPARK_LOCAL_DIRS"] = ",".join(str(one.path) for one in own)
    try:
        yield
    finally:
        os.environ["SPARK_LOCAL_DIRS"] = given
        for one in own:
            one.remove()
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def _log4j() -> Path:
    return Path(__file__).with_name("log4j2.properties")


@contextmanager
def _standard_error_to(log: Path | None) -> Iterator[None]:
    """Redirects the standard error of processes started in the block to a file."""
    if log is None:
        yield
        return
    saved = os.dup(2)
    try:
        with open(log, "wb") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
