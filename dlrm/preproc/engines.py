"""Opens the engine that a command's flags name."""

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm.command_line import missing_extra
from dlrm.flags import UsageError, Values
from dlrm.limits import check_processes
from dlrm.locks import OwnedDirectory, new_suffix, remove_abandoned
from dlrm.preproc.errors import EngineError, TaskError
from dlrm.preproc.work_folder import shared_folders
from dlrm.remote.cache import origin_of
from dlrm.remote.uri import Uri, is_uri
from dlrm.settings import setting

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    from dlrm.preproc.engine import Engine

ENGINES = ("spark", "local")

_LOG4J = Path(__file__).with_name("log4j2.properties")
_JVM = "-XX:+IgnoreUnrecognizedVMOptions -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
# The optimizing compiler would take more processor time than its code saves: 45 s, not 37 s, for 4
# million rows on 2 cores. Over TCP a task waits 40 ms for the acknowledgment of a small packet.
# Other clusters have their own settings, and YARN's directories have names that are too long for a
# socket.
_OWN_CLUSTER = {
    "spark.driver.defaultJavaOptions": _JVM,
    "spark.executor.defaultJavaOptions": _JVM,
    "spark.python.unix.domain.socket.enabled": "true",  # from Spark 4.1 on
    # Otherwise late executors would start while others already run the first stage.
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",  # of spark.cores.max
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "15s",
}


@dataclass(frozen=True)
class SparkConfig:
    """A session of Spark; field names are those of the flags.

    Raises:
        UsageError: a setting is not of the form NAME=VALUE.
    """

    master: str | None = setting(
        None, "Spark master; default: that of spark-submit, else local[cores]"
    )
    memory_gib: int = setting(
        4,
        "memory of Spark, in GiB; on a cluster that of the driver and of each executor",
        least=1,
    )
    conf: tuple[str, ...] = setting((), "NAME=VALUE, a setting of Spark", repeated=True)

    def __post_init__(self) -> None:
        if wrong := [item for item in self.conf if "=" not in item]:
            raise UsageError(f"--conf: expected NAME=VALUE, got {wrong[0]!r}")
        if (self.master or "").startswith("sc:"):
            raise UsageError(
                f"--master {self.master}: expected the master of a cluster, got a server of Spark "
                "Connect, whose sessions dlrm.preproc.run takes in Python"
            )


@contextmanager
def open_engine(
    name: str,
    cores: int,
    spill: Path,
    memory: int | None = None,
    spark: SparkConfig | None = None,
    output: Path | None = None,
    say: Callable[[str], None] = print,
    log: Path | None = None,
) -> Iterator["Engine"]:
    """Starts an engine, and stops it at the end of the block.

    Args:
        name: "local" for processes of this machine, or "spark".
        cores: number of cores of this machine, for either engine.
        spill: directory for what memory does not hold, of this machine's engine.
        memory: bytes of memory of it for sums and sorting.
        spark: the session of Spark; None is one with the defaults.
        output: what executors write, if anything.
        say: called with a line about Spark's pages, before the first task.
        log: file of Spark's messages; by default beside the output, or in the working directory.

    Raises:
        ValueError: too many cores.
        EngineError: Spark cannot be started; see `spark_session` and `SparkEngine.start`.
    """
    check_processes("--cores", cores)
    if name == "local":
        from dlrm.preproc.duckdb_engine import local_engine

        with local_engine(cores, spill, memory, forked=True) as engine:
            yield engine
        return
    spark = spark or SparkConfig()
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ  # by spark-submit, which knows the master
    master = spark.master or (None if submitted else f"local[{cores}]")
    settings = dict(item.split("=", 1) for item in spark.conf)
    is_here = output is not None and not is_uri(origin_of(output))
    folder = output.resolve().parent if output and is_here else Path.cwd()
    log = log or folder / "spark.log"
    with spark_session(master, spark.memory_gib, log, settings, say) as session:
        yield session_engine(session, output, say, log)


def reads_by_uri(values: Mapping[str, Any], output: Any) -> bool:
    """Returns whether executors read input and write rows by URI, as they share no folder.

    Args:
        values: the flags of `SparkConfig`, and `engine`.
        output: the output, or its copy in the cache.
    """
    if output is None or values["engine"] != "spark" or not is_uri(origin_of(output)):
        return False
    return is_on_cluster(values["master"])


@contextmanager
def local_inputs(values: Values, names: Sequence[str], output: Path) -> Iterator[Values]:
    """Has flags with paths in place of the URIs that executors read, within the block."""
    if not reads_by_uri(values, output):
        yield values
        return
    from dlrm.preproc.stored_files import outlined_inputs

    with outlined_inputs(values, names, Uri.parse(origin_of(output))) as local:
        yield local


def session_engine(
    session: "SparkSession",
    output: Path | None,
    say: Callable[[str], None],
    log: Path | None = None,
) -> "Engine":
    """Returns the engine of a session, which may be one of Spark Connect.

    Args:
        output: what executors write, if anything; they have the same folder, or it is a copy of
            what is at a URI.
        log: file of Spark's messages, for the reason why no task starts.

    Raises:
        EngineError: the session does not run tasks; see `SparkEngine.start`.
    """
    from dlrm.preproc.spark_engine import SparkEngine

    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)  # which raises them too
    folders = filter(Path.exists, shared_folders(output)) if output else ()
    files, check = None, partial(_check_folders, list(folders))
    need = (
        "Every executor needs this directory under the same path, and may write in it as the same "
        "user or as one of its group"
    )
    if output and is_uri(place := origin_of(output)) and not shares_folders(session):
        from dlrm.preproc.stored_files import StoredFiles, check_store

        files = StoredFiles(Uri.parse(place), shared_folders(output)[0])
        check = partial(check_store, files.uri)
        need = (
            "Executors read and write it with credentials and an endpoint of their own, such as "
            "those of --conf spark.executorEnv.AWS_ENDPOINT_URL=URL"
        )
    if address := _address(session):
        say(f"Spark UI: {address}")
        sys.stdout.flush()  # executors may be long in coming
    engine = SparkEngine(session, files)
    try:
        engine.start(check, partial(_reason, log))
    except TaskError as error:
        raise EngineError(f"{error}. {need} (preproc/README.md, Clusters)") from error
    return engine


def shares_folders(session: "SparkSession") -> bool:
    """Returns whether a session runs its tasks in processes that see the folders of this one."""
    context = _context(session)
    return context is not None and not is_on_cluster(context.master)


def _context(session: "SparkSession") -> Any:
    """Returns the context of a session with a JVM, otherwise None."""
    try:
        context = session.sparkContext
        stopped = context._jsc is None or context._jsc.sc().isStopped()
    except Exception:  # Spark Connect has none, and others forbid it with errors of their own
        return None
    if stopped:
        raise EngineError("the session of Spark has been stopped; expected a running one")
    return context


def _address(session: "SparkSession") -> str | None:
    context = _context(session)
    return None if context is None else context.uiWebUrl


def _check_folders(folders: Sequence[Path]) -> None:
    """Creates, writes, renames and removes a file in each directory."""
    for folder in folders:
        path = Path(folder, f".dlrm-probe-{new_suffix()}")
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
            what = f"{error.strerror}: cannot {step} a file"
            raise OSError(error.errno, what, str(folder)) from None


def is_on_cluster(master: str | None) -> bool:
    """Returns whether Spark's tasks will run on other machines; see `spark_session`."""
    if "pyspark" in sys.modules:
        from pyspark import SparkContext

        if (running := SparkContext._active_spark_context) is not None:
            master = running.master
    if master is None and "PYSPARK_GATEWAY_PORT" in os.environ:  # by spark-submit
        from pyspark import SparkConf, SparkContext

        SparkContext._ensure_initialized()
        master = SparkConf().get("spark.master", "local")
    return re.fullmatch(r"local(\[.*\])?", master or "local") is None


@contextmanager
def spark_session(
    master: str | None,
    memory_gib: int,
    log: Path | None = None,
    settings: dict[str, str] | None = None,
    say: Callable[[str], None] = print,
) -> Iterator["SparkSession"]:
    """Starts Spark and stops it at the end; uses a running Spark of this process, and leaves it.

    The environment variable PYSPARK_PYTHON or the setting `spark.pyspark.python` names the Python
    of the executors; the default is this one.

    Args:
        master: "local[N]" or the address of a cluster; None: that of `spark-submit`.
        memory_gib: total memory, and on a cluster that of the driver and of each executor; half is
            for the JVM, half for Python's workers.
        log: file for the JVM's output, instead of the terminal.
        settings: Spark's own settings, which take precedence.
        say: called with a note about a running Spark.

    Raises:
        EngineError: pyspark is not installed, or Spark does not start.
    """
    try:
        import pandas  # noqa: F401, ICN001  # which mapInArrow asks for
        from pyspark import SparkConf, SparkContext
        from pyspark.sql import SparkSession
    except ImportError as error:
        need = missing_extra(error, "preproc")
        raise EngineError(
            f"{sys.executable}: {need}, and --engine local prepares files without Spark"
        ) from error
    from dlrm.preproc.duckdb_engine import return_memory
    from dlrm.preproc.executors import error_of

    logging.getLogger("py4j").setLevel(logging.WARNING)  # absl would print its messages
    if (running := SparkContext._active_spark_context) is not None:
        say(
            f"note: uses the Spark session of this process ({running.master}), so --master, "
            "--memory_gib and --conf have no effect"
        )
        yield SparkSession.getActiveSession() or SparkSession(running)
        return
    os.environ["PYSPARK_PYTHON"] = os.environ.get("PYSPARK_PYTHON") or sys.executable
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    os.environ["PYTHONPATH"] = path
    return_memory()
    starts_jvm = "PYSPARK_GATEWAY_PORT" not in os.environ  # which spark-submit sets
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
                with _standard_error_to(log):
                    context = SparkContext(conf=conf)
            except Exception as error:  # py4j's, and the gateway's
                reason = _reason(log) if starts_jvm else ""
                cause = str(error_of(error)).partition(": ")[2]
                shown = f"{cause}; its log: {reason}" if reason else cause
                raise EngineError(f"Spark did not start: {shown}") from error
            python = context.getConf().get("spark.pyspark.python", context.pythonExec)
            context.pythonExec = python or context.pythonExec
            try:
                yield SparkSession(context)
            except EngineError as error:
                if context._jsc is not None and context._jsc.sc().isStopped():
                    raise EngineError(f"Spark stopped: {_reason(log) or error}") from error
                raise
            finally:
                _stop(context)
    except EngineError as error:
        hint = f"; see {log}" if starts_jvm and log else ""
        raise EngineError(f"{error}{hint}") from error


def configuration(
    master: str | None, memory_gib: int, python_path: str, settings: dict[str, str]
) -> dict[str, str]:
    """Returns Spark's settings for the arguments of `spark_session`; `settings` take precedence."""
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
        "spark.ui.retainedTasks": "1000",  # of a stage, which the driver keeps for Spark's pages
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_LOG4J}",
        **place,
        **(_OWN_CLUSTER if re.match("local|spark://", master or "") else {}),
        **settings,
    }


def _reason(log: Path | None) -> str:
    """Returns the last error with a reason in Spark's log, or else the last warning, or nothing."""
    text = "" if log is None or not log.exists() else log.read_text(errors="replace")
    for level in ("ERROR", "WARN"):
        # Inboxes report an exception of their own, "Ignoring error", after the reason.
        said = re.findall(rf"^[\d:]{{8}} {level} (?!Inbox:)[\w$]+: (.*)", text, re.MULTILINE)
        if said:
            return said[-1].rstrip(".")
    return ""


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
