"""Runs tasks on Spark, which schedules them on this machine or a cluster and retries failures.

Rows and counts do not pass through Spark: tasks read the logs and write files, on storage that
every node mounts at the same path, so Spark converts, sorts and keeps nothing.
"""

import gc
import importlib
import logging
import os
import pwd
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm.command_line import missing_extra
from dlrm.locks import OwnedDirectory, remove_abandoned
from dlrm.preproc.duckdb_engine import return_memory
from dlrm.preproc.errors import EngineError, TaskError
from dlrm.preproc.execution.executors import checked, executor_error
from dlrm.remote.uri import Uri

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, Row, SparkSession

_MARK = "dlrm-task-error:"
_JVM = "-XX:+IgnoreUnrecognizedVMOptions -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
# These save 50 of the 80 ms of an empty task on 2 cores with Spark 4.3. The JVM only schedules, so
# its optimizing compiler would take cores from the tasks; and over TCP a task waits 40 ms for the
# acknowledgment of a small packet. Other clusters have their own settings, and YARN's directories
# have names that are too long for a socket.
_OWN_CLUSTER = {
    "spark.driver.defaultJavaOptions": _JVM,
    "spark.executor.defaultJavaOptions": _JVM,
    "spark.python.unix.domain.socket.enabled": "true",  # from Spark 4.1 on
    # Otherwise late executors would start while others already run the first stage.
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",  # of spark.cores.max
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "15s",
}


_LOG4J = Path(__file__).with_name("log4j2.properties")
START = "dlrm start"  # the first stage
DEADLINE = "spark.dlrm.startTimeout"


class SparkEngine:
    """Runs tasks on a Spark context, with the umask of the process that created it."""

    is_distributed = True

    def __init__(self, spark: "SparkContext", session: "SparkSession | None" = None) -> None:
        self._spark, self._session, self._umask = spark, session, umask()

    @property
    def cores(self) -> int:
        """Returns the number of tasks that run at a time."""
        return max(self._spark.defaultParallelism, 1)

    @property
    def address(self) -> str | None:
        """Returns the address of Spark's own pages, if they are enabled."""
        return self._spark.uiWebUrl

    def session(self) -> "SparkSession":
        """Returns the session, which reads tables: the user's, or the active one if any."""
        from pyspark.sql import SparkSession

        quiet_errors()
        return self._session or SparkSession.getActiveSession() or SparkSession(self._spark)

    def start(self, folders: Sequence[Path | Uri] = (), log: Path | None = None) -> None:
        """Starts Python on every core, and checks that tasks can write files into directories.

        Executors that differ from the driver and directories that are not shared are so reported
        before any work.

        Args:
            folders: directories, on storage that every node mounts.
            log: file of Spark's messages, for the reason why no task starts.

        Raises:
            EngineError: no task starts within the deadline, or an executor cannot write or has
                another environment; the message has Spark's reason, or the executor's host, and
                its user and directory.
        """
        deadline, late = _seconds(self._deadline()), threading.Event()
        over, probed = threading.Event(), 0
        watch = threading.Thread(
            target=self._cancel_without_progress, args=(deadline, over, late), daemon=True
        )
        watch.start()
        try:
            with failures():
                while (cores := self._count_cores()) > probed:  # more have registered
                    probe = partial(_probe, [*folders])
                    self.run(START, probe, range(cores))
                    probed = cores
        except TaskError as error:
            need = (
                "Every executor needs this directory under the same path, and may write in it as "
                "the same user or as one of its group"
            )
            if any(isinstance(folder, Uri) for folder in folders):
                need = (
                    "Executors read and write it with credentials and an endpoint of their own, "
                    "such as those of --conf spark.executorEnv.AWS_ENDPOINT_URL=URL"
                )
            raise EngineError(f"{error}. {need} (preproc/README.md, Clusters)") from error
        except EngineError as error:
            if not late.is_set():
                if self._is_stopped():  # as when there is no master
                    raise EngineError(f"Spark stopped: {_reason(log) or error}") from error
                raise
            reason = _reason(log) or "no executor has registered, or none has a free core"
            raise EngineError(
                f"Spark started no task within {deadline} s: {reason}. --conf {DEADLINE}=600s "
                "waits longer"
            ) from error
        finally:
            over.set()

    def _deadline(self) -> str:
        return self._spark.getConf().get(DEADLINE, "120s") or ""

    def _is_stopped(self) -> bool:
        return self._spark._jsc.sc().isStopped()

    def _count_cores(self) -> int:
        return self.cores

    def _cancel_without_progress(
        self, deadline: int, over: threading.Event, late: threading.Event
    ) -> None:
        """Ends the first stage once no task runs, and none has ended within the deadline."""
        before = 0
        while not over.wait(deadline):
            active, ended = self._progress_of(START)
            if not active and ended == before:
                late.set()
                self._cancel(START)
                return
            before = ended

    def _progress_of(self, stage: str) -> tuple[int, int]:
        """Returns the numbers of running and of ended tasks of a stage."""
        tracker = self._spark.statusTracker()
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(stage)]
        ids = [stage for job in jobs if job for stage in job.stageIds]
        stages = [stage for stage in map(tracker.getStageInfo, ids) if stage]
        ended = sum(stage.numCompletedTasks + stage.numFailedTasks for stage in stages)
        return sum(stage.numActiveTasks for stage in stages), ended

    def run(self, stage: str, task: Callable[[Any], None], items: Sequence[Any]) -> None:
        """Calls a task with every item; see `dlrm.preproc.engine.Engine`."""
        act = self._for_each(self._checked(task), items)

        def run() -> None:
            with failures():
                act()

        self._wait_for(stage, run)

    def collect(
        self, stage: str, task: Callable[[Any], Any], frame: "DataFrame", columns: str
    ) -> "list[Row]":
        """Calls a task with the batches of each partition of a data frame, maybe more than once.

        Args:
            task: a function of an iterator of Arrow batches that returns one. It can be pickled.
            columns: names and types of the columns that the task returns.

        Returns:
            The rows of one call for each partition.

        Raises:
            PySparkException: Spark failed, or a task did.
        """
        mapped = frame.mapInArrow(self._checked(task), columns)
        return self._wait_for(stage, mapped.collect)

    def _checked(self, task: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return checked(_named(task, self._umask, _host_and_user()))

    def _wait_for(self, stage: str, act: Callable[[], Any]) -> Any:
        """Returns the result of a stage, which is canceled if a signal ends this process.

        A thread waits on a connection of its own: in the main thread a signal would interrupt the
        wait, and the next call would read the answer to this one.
        """
        act = self._job(stage, act)
        with ThreadPoolExecutor(1) as thread:
            try:
                return thread.submit(act).result()
            except (KeyboardInterrupt, SystemExit):
                with suppress(Exception):  # a signal to the whole group ends the JVM as well
                    self._cancel(stage)
                raise

    def _for_each(self, task: Callable[[Any], None], items: Sequence[Any]) -> Callable[[], Any]:
        """Returns a function that calls a task with every item, on Spark."""
        return lambda: self._spark.parallelize(items, max(len(items), 1)).foreach(task)

    def _job(self, stage: str, act: Callable[[], Any]) -> Callable[[], Any]:
        """Returns a function that acts in the thread that calls it, so that it can be canceled."""
        properties = self._spark._jsc.sc().getLocalProperties().clone()

        def job() -> Any:
            self._spark._jsc.sc().setLocalProperties(properties)
            self._spark.setJobGroup(stage, stage)
            return act()

        return job

    def _cancel(self, stage: str) -> None:
        self._spark.cancelJobGroup(stage)


def quiet_errors() -> None:
    """Keeps pyspark from printing, as JSON, errors of queries that it raises as well."""
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)


def is_on_cluster(master: str | None) -> bool:
    """Returns whether Spark's tasks will run on other machines; see `spark_engine`."""
    if "pyspark" in sys.modules:
        from pyspark import SparkContext

        if (running := SparkContext._active_spark_context) is not None:
            master = running.master
    if master is None and "PYSPARK_GATEWAY_PORT" in os.environ:  # by spark-submit
        from pyspark import SparkConf, SparkContext

        SparkContext._ensure_initialized()
        master = SparkConf().get("spark.master", "local")
    return re.fullmatch(r"local(\[.*\])?", master or "local") is None


def umask() -> int:
    """Returns the umask of this process."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _seconds(text: str) -> int:
    match = re.fullmatch(r"(\d{1,6}) *s?", text.strip())
    if match is None:
        raise ValueError(f"--conf {DEADLINE}: expected seconds, as in 120s, got {text!r}")
    return int(match[1])


def _probe(folders: Sequence[Path | Uri], _: int) -> None:
    """Creates, writes, renames and removes a file in each directory, and an object below a URI."""
    for folder in folders:
        if isinstance(folder, Uri):
            _probe_store(folder)
            continue
        path = Path(folder, f".dlrm-probe-{uuid.uuid4().hex}")
        step = "create"
        try:
            with open(path, "xb") as file:
                step = "write"
                file.write(b"probe")
            step = "rename"
            path = path.rename(f"{path}.renamed")
            step = "remove"
            path.unlink()
        except OSError as error:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            raise OSError(
                error.errno, f"{error.strerror}: cannot {step} a file", str(folder)
            ) from None


def _probe_store(uri: Uri) -> None:
    """Writes, reads, lists and removes an object."""
    from dlrm.remote.publish import RUN
    from dlrm.remote.store import open_store

    store, key = open_store(uri), uri.below(f"{RUN}/.probe-{uuid.uuid4().hex}").key
    store.write(key, b"probe")
    try:
        if bytes(store.read(store.entry(key))) != b"probe" or not store.entries(key):
            raise OSError(f"{uri}: an object that was written is not there")
    finally:
        store.remove(key)


def _host_and_user() -> tuple[str, str]:
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # as in containers
        user = str(os.geteuid())
    return os.uname().nodename, user


class _named:  # noqa: N801  (used as a function)
    """A task whose errors of input and output differ from Spark's own, and have a place."""

    def __init__(self, task: Callable[[Any], Any], umask: int, driver: tuple[str, str]) -> None:
        self.task, self.umask, self.driver = task, umask, driver

    def __call__(self, item: Any) -> Any:
        _freeze_what_is_loaded()
        os.umask(self.umask)
        try:
            return self.task(item)
        except ValueError as error:
            raise RuntimeError(f"{_MARK}{error}{_MARK}") from None
        except OSError as error:
            raise RuntimeError(f"{_MARK}{error}{self._place(error)}{_MARK}") from None

    def _place(self, error: OSError) -> str:
        """Returns the host and the user of an error, unless they are the driver's."""
        host, user = _host_and_user()
        if (host, user) == self.driver:
            return ""
        unseen = "; not seen by this node" * isinstance(error, FileNotFoundError)
        return f" (on host {host} as user {user}{unseen})"


@cache
def _freeze_what_is_loaded() -> None:
    """Excludes loaded modules from the garbage collection after every Spark task.

    It would take 25 ms, for pyspark's modules alone.
    """
    importlib.import_module("dlrm.preproc.stages.tasks")
    gc.collect()
    gc.freeze()


@contextmanager
def failures() -> Iterator[None]:
    """Turns Spark's errors into one line: the task's message, otherwise Spark's cause.

    Raises:
        TaskError, EngineError: see `dlrm.preproc.engine.Engine`.
    """
    try:
        yield
    except spark_errors() as error:
        text = str(error)
        if known := error_of_task(text):
            raise known from None
        raise EngineError(f"Spark failed: {causes_of(text) or text.splitlines()[0]}") from error


def error_of_task(text: str) -> TaskError | EngineError | None:
    """Returns the error of a task, or of its executor, that an error of Spark has; or None."""
    if said := re.search(f"{_MARK}(.*?){_MARK}", text, re.DOTALL):
        return TaskError(said[1])
    problem = executor_error(text)
    return EngineError(problem) if problem else None


def spark_errors() -> tuple[type[Exception], ...]:
    """Returns the classes of errors that pyspark raises."""
    from pyspark.errors import PySparkException

    with suppress(ImportError):  # which a client of Spark Connect may lack
        from py4j.protocol import Py4JError

        return Py4JError, PySparkException  # the latter once a SparkSession exists
    return (PySparkException,)


def causes_of(text: str) -> str:
    """Returns the causes that a traceback names, each one once, in its order."""
    named = r"^(?:Caused by: |: )?((?:[\w.$]+\.)?\w*(?:Error|Exception): ?.*)"
    causes: list[str] = []
    for cause in re.findall(named, text, re.MULTILINE):
        cause = cause.removesuffix("Traceback (most recent call last):").strip()
        if not any(cause.partition(": ")[2] in earlier for earlier in causes):
            causes.append(cause)
    return "; ".join(causes)


def _reason(log: Path | None) -> str:
    """Returns the last error with a reason in Spark's log, or else the last warning, or nothing."""
    text = "" if log is None or not log.exists() else log.read_text(errors="replace")
    for level in ("ERROR", "WARN"):
        # Inboxes report an exception of their own, "Ignoring error", after the reason.
        said = re.findall(rf"^[\d:]{{8}} {level} (?!Inbox:)[\w$]+: (.*)", text, re.MULTILINE)
        if said:
            return said[-1].rstrip(".")
    return ""


@contextmanager
def spark_engine(
    master: str | None,
    memory_gib: int,
    log: Path | None = None,
    settings: dict[str, str] | None = None,
    folders: Sequence[Path | Uri] = (),
    say: Callable[[str], None] = print,
) -> Iterator[SparkEngine]:
    """Starts Spark and stops it at the end; uses a running Spark of this process, and leaves it.

    The environment variable PYSPARK_PYTHON or the setting `spark.pyspark.python` names the Python
    of the executors; the default is this one.

    Args:
        master: "local[N]" or the address of a cluster; None: that of `spark-submit`.
        memory_gib: total memory, and on a cluster that of the driver and of each executor; half is
            for the JVM, half for Python's workers.
        log: file for the JVM's output, instead of the terminal.
        settings: Spark's own settings, which take precedence.
        folders: directories that every executor must be able to write in.
        say: called with a line about Spark's pages, before the first task.

    Raises:
        EngineError: pyspark is not installed, or Spark does not start; see `SparkEngine.start`.
    """
    try:
        from pyspark import SparkConf, SparkContext
    except ImportError as error:
        need = missing_extra(error, "preproc")
        raise EngineError(
            f"{sys.executable}: {need}, and --engine local prepares files without Spark"
        ) from error
    logging.getLogger("py4j").setLevel(logging.WARNING)  # absl would print its messages
    if (running := SparkContext._active_spark_context) is not None:
        say(
            f"note: uses the Spark session of this process ({running.master}), so --master, "
            "--memory_gib and --conf have no effect"
        )
        yield started(SparkEngine(running), folders, None, say)
        return
    os.environ["PYSPARK_PYTHON"] = os.environ.get("PYSPARK_PYTHON") or sys.executable
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    os.environ["PYTHONPATH"] = path
    return_memory()
    starts_jvm = "PYSPARK_GATEWAY_PORT" not in os.environ  # which spark-submit sets
    hint = f"; see {log}" if starts_jvm and log else ""
    if not starts_jvm:
        SparkContext._ensure_initialized()  # SparkConf then has the settings of spark-submit
    conf = SparkConf().setAppName("dlrm preprocessing")
    if master is not None:
        conf.setMaster(master)
    ours = configuration(master, memory_gib, path, settings or {})
    for name, value in (ours if starts_jvm else ours | {"spark.log.level": "WARN"}).items():
        conf.setIfMissing(name, value)
    conf.setAll([*(settings or {}).items()])
    try:
        with own_local_folders():
            try:
                with _standard_error_to(log), failures():
                    spark = SparkContext(conf=conf)
            except EngineError as error:
                reason, cause = _reason(log) if starts_jvm else "", str(error).partition(": ")[2]
                shown = f"{cause}; its log: {reason}" if reason else cause
                raise EngineError(f"Spark did not start: {shown}") from error
            spark.pythonExec = spark.getConf().get("spark.pyspark.python", spark.pythonExec)
            try:
                yield started(SparkEngine(spark), folders, log if starts_jvm else None, say)
            finally:
                _stop(spark)
    except EngineError as error:
        raise EngineError(f"{error}{hint}") from error


def started(
    engine: SparkEngine, folders: Sequence[Path | Uri], log: Path | None, say: Callable[[str], None]
) -> SparkEngine:
    """Names the address of Spark's pages, and starts an engine; see `SparkEngine.start`."""
    if engine.address:
        say(f"Spark UI: {engine.address}")
        sys.stdout.flush()  # executors may be long in coming
    engine.start(folders, log)
    return engine


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
        "spark.hadoop.fs.permissions.umask-mode": f"{umask():03o}",  # of files of the JVM
        "spark.ui.showConsoleProgress": "false",
        "spark.ui.retainedTasks": "1000",  # of a stage, which the driver keeps for Spark's pages
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_LOG4J}",
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
    folders: list[OwnedDirectory] = []
    made = []
    for folder in map(Path, filter(None, given.split(","))):
        if remove_abandoned(folder, prefix) or not os.path.lexists(folder):
            made.append(folder)
        folder.mkdir(parents=True, exist_ok=True)
        folders.append(OwnedDirectory(folder, prefix))
    os.environ["SPARK_LOCAL_DIRS"] = ",".join(str(owned.path) for owned in folders)
    try:
        yield
    finally:
        os.environ["SPARK_LOCAL_DIRS"] = given
        for owned in folders:
            owned.remove()
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


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
