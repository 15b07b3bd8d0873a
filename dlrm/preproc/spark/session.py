"""Engines that flags name, and sessions of Spark: of a command, a program or spark-submit."""

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm.command_line import missing_extra
from dlrm.flags import UsageError, Values
from dlrm.limits import check_processes
from dlrm.preproc.errors import EngineError
from dlrm.preproc.work_folder import work_path
from dlrm.remote.cache import Cache
from dlrm.remote.config import CacheConfig
from dlrm.remote.localize import show_uris
from dlrm.remote.uri import Uri, is_uri, origin
from dlrm.settings import setting, settings_of

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    from dlrm.preproc.engine import Engine
    from dlrm.preproc.spark.engine import SparkEngine

ENGINES = ("spark", "local")
_LOG4J = Path(__file__).with_name("log4j2.properties")
# The optimizing compiler would take more processor time than its code saves: 45 s, not 37 s, for 4
# million rows on 2 cores.
_SERIAL = "-XX:+UseSerialGC"
_JVM = f"-XX:+IgnoreUnrecognizedVMOptions -XX:TieredStopAtLevel=1 {_SERIAL}"


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

    @property
    def for_queries(self) -> "SparkConfig":
        """Returns the same with an optimizing compiler, unless settings say otherwise."""
        options = [f"spark.{of}.defaultJavaOptions={_SERIAL}" for of in ("driver", "executor")]
        return replace(self, conf=(*options, *self.conf))


def session_engine(
    session: "SparkSession", output: Path | None, say: Callable[[str], None]
) -> "SparkEngine":
    """Returns the engine of a session, which may be one of Spark Connect.

    Args:
        output: what executors write, if anything; they have the same folder, or it is a copy of
            what is at a URI.

    Raises:
        EngineError: the session does not run tasks.
    """
    from dlrm.preproc.spark.engine import SparkEngine

    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)  # which raises them too
    files = None
    if output and is_uri(uri := origin(output)) and not shares_folders(session):
        from dlrm.preproc.spark.stored_files import StoredFiles

        files = StoredFiles(Uri.parse(uri), work_path(output))
    if (context := _context(session)) is not None and context.uiWebUrl:
        say(f"Spark UI: {context.uiWebUrl}")
        sys.stdout.flush()  # executors may be long in coming
    return SparkEngine(session, files)


def shares_folders(session: "SparkSession") -> bool:
    """Returns whether a session runs its tasks in processes that see the folders of this one."""
    context = _context(session)
    return context is not None and _is_here(context.master)


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


def _is_here(master: str | None) -> bool:
    return re.fullmatch(r"local(\[.*\])?", master or "") is not None


@contextmanager
def spark_session(
    config: SparkConfig, cores: int, log: Path, say: Callable[[str], None] = print
) -> Iterator["SparkSession"]:
    """Starts Spark and stops it at the end; uses a running Spark of this process, and leaves it.

    The environment variable PYSPARK_PYTHON or the setting `spark.pyspark.python` names the Python
    of the executors; the default is this one. Half of the memory is for the JVM, half for Python.

    Args:
        cores: number of cores of this machine, if there is no master.
        log: file for the JVM's output, instead of the terminal.
        say: called with a note about a running Spark.

    Raises:
        EngineError: pyspark is not installed, or Spark does not start.
    """
    try:
        import pandas  # noqa: F401, ICN001  # which mapInArrow asks for
        from pyspark import SparkConf, SparkContext
        from pyspark.java_gateway import launch_gateway
        from pyspark.sql import SparkSession
    except ImportError as error:
        need = missing_extra(error, "preproc")
        raise EngineError(
            f"{sys.executable}: {need}, and --engine local prepares files without Spark"
        ) from error
    from dlrm.preproc.spark.executors import error_of
    from dlrm.variables import return_memory

    logging.getLogger("py4j").setLevel(logging.WARNING)  # absl would print its messages
    if (running := SparkContext._active_spark_context) is not None:
        say(
            f"note: uses the Spark session of this process ({running.master}), so --master, "
            "--memory_gib and --conf have no effect"
        )
        yield SparkSession.getActiveSession() or SparkSession(running)
        return
    os.environ["PYSPARK_PYTHON"] = os.environ.get("PYSPARK_PYTHON") or sys.executable
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    os.environ["PYTHONPATH"] = path
    return_memory()
    master, hint, more = config.master, f"; see {log}", {}
    if "PYSPARK_GATEWAY_PORT" in os.environ:  # the JVM of spark-submit, with its settings
        SparkContext._ensure_initialized()
        hint, more = "", {"spark.log.level": "WARN"}
    else:
        master = master or f"local[{cores}]"
    conf = SparkConf().setAppName("dlrm preprocessing")
    if master is not None:
        conf.setMaster(master)
    for name, value in (configuration(master, config.memory_gib, path) | more).items():
        conf.setIfMissing(name, value)
    conf.setAll([(name, value) for name, _, value in (one.partition("=") for one in config.conf)])
    local = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")
    made = [folder for folder in local if folder and not os.path.exists(folder)]
    try:
        try:
            with open(log, "wb") as file:
                gateway = SparkContext._gateway or launch_gateway(conf, {"stderr": file})
            context = SparkContext(conf=conf, gateway=gateway)
            python = context.getConf().get("spark.pyspark.python")
            context.pythonExec = python or context.pythonExec
            started = SparkSession(context)  # which fails after a master that does not answer
        except Exception as error:  # py4j's, and the gateway's
            cause = str(error_of(error)).partition(": ")[2]
            raise EngineError(f"Spark did not start: {cause}") from error
        yield started
    except EngineError as error:
        raise EngineError(f"{error}{hint}") from error
    finally:
        _stop(SparkContext)
        for folder in made:
            with suppress(OSError):
                os.rmdir(folder)


def configuration(master: str | None, memory_gib: int, python_path: str) -> dict[str, str]:
    """Returns settings of Spark for a master; None is that of spark-submit."""
    memory = f"{max(memory_gib // 2, 1)}g"
    made = {
        "spark.driver.memory": memory,
        "spark.executorEnv.PYTHONPATH": python_path,
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_LOG4J}",
    }
    if _is_here(master):
        made |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    else:
        made |= {"spark.executor.memory": memory}
    if re.match("local|spark://", master or ""):  # other clusters have settings of their own
        made |= {
            "spark.driver.defaultJavaOptions": _JVM,
            "spark.executor.defaultJavaOptions": _JVM,
            # Cores are counted at the start, when those of spark.cores.max are there.
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        }
    return made


def _stop(context: "type[SparkContext]") -> None:
    """Stops Spark and its JVM, which removes its last temporary files on exit."""
    if context._active_spark_context is not None:
        context._active_spark_context.stop()
    if (gateway := context._gateway) is None or gateway.proc is None:
        return  # spark-submit started the JVM, and ends it
    gateway.shutdown()
    gateway.proc.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        gateway.proc.wait(timeout=30)
    context._gateway = context._jvm = None  # so that another Spark can start


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
        ValueError: too many cores, or `memory` with Spark.
        EngineError: Spark cannot be started, or an executor lacks the package.
    """
    check_processes("--cores", cores)
    if name == "local":
        from dlrm.preproc.duckdb_engine import local_engine

        with local_engine(cores, spill, memory, forked=True) as engine:
            yield engine
        return
    if memory is not None:
        raise ValueError("--memory: expected --engine local; --memory_gib is that of Spark")
    is_here = output is not None and not is_uri(origin(output))
    folder = output.resolve().parent if output and is_here else Path.cwd()
    log = log or folder / "spark.log"
    with spark_session(spark or SparkConfig(), cores, log, say) as session:
        yield session_engine(session, output, say)


def reads_by_uri(values: Mapping[str, Any], output: Any) -> bool:
    """Returns whether executors read input and write rows by URI, as they share no folder.

    Args:
        values: the flags of `SparkConfig`, and `engine`.
        output: the output, or its copy in the cache.
    """
    if output is None or values["engine"] != "spark" or not is_uri(origin(output)):
        return False
    master, is_submitted = values["master"] or "local", "PYSPARK_GATEWAY_PORT" in os.environ
    if "pyspark" in sys.modules or is_submitted:
        from pyspark import SparkConf, SparkContext

        if (running := SparkContext._active_spark_context) is not None:
            master = running.master
        elif values["master"] is None and is_submitted:
            SparkContext._ensure_initialized()
            master = SparkConf().get("spark.master", "local")
    return not _is_here(master)


@contextmanager
def local_inputs(values: Values, names: Sequence[str], output: Path) -> Iterator[Values]:
    """Has flags with paths in place of the URIs that executors read, within the block."""
    if not reads_by_uri(values, output):
        yield values
        return
    from dlrm.preproc.spark.stored_files import outlines

    show_uris()
    with outlines(Cache.of_flags(values), Uri.parse(origin(output))) as outlined:
        found = {name: outlined(values[name], name) for name in names if values[name]}
        yield values.without(settings_of(CacheConfig)).replaced(found)
