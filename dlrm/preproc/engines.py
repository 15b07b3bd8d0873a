"""Opens the engine that a command's flags name."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm.flags import Values
from dlrm.limits import check_processes
from dlrm.preproc.spark.session import SparkConfig, is_on_cluster, session_engine, spark_session
from dlrm.remote.cache import Cache, origin_of
from dlrm.remote.config import CacheConfig
from dlrm.remote.edges import show_uris
from dlrm.remote.uri import Uri, is_uri
from dlrm.settings import settings_of

if TYPE_CHECKING:
    from dlrm.preproc.engine import Engine

ENGINES = ("spark", "local")


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
        EngineError: Spark cannot be started, or an executor lacks the package.
    """
    check_processes("--cores", cores)
    if name == "local":
        from dlrm.preproc.duckdb_engine import local_engine

        with local_engine(cores, spill, memory, forked=True) as engine:
            yield engine
        return
    is_here = output is not None and not is_uri(origin_of(output))
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
    if output is None or values["engine"] != "spark" or not is_uri(origin_of(output)):
        return False
    return is_on_cluster(values["master"])


@contextmanager
def local_inputs(values: Values, names: Sequence[str], output: Path) -> Iterator[Values]:
    """Has flags with paths in place of the URIs that executors read, within the block."""
    if not reads_by_uri(values, output):
        yield values
        return
    from dlrm.preproc.spark.stored_files import outlines

    show_uris()
    with outlines(Cache.of_flags(values), Uri.parse(origin_of(output))) as outlined:
        found = {name: outlined(values[name], name) for name in names if values[name]}
        yield values.without(settings_of(CacheConfig)).replaced(found)
