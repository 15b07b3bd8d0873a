"""Opens the engine that a command's flags name."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from dlrm.limits import check_processes
from dlrm.preproc.execution.engines import Engine, local_engine
from dlrm.preproc.execution.spark_engine import spark_engine

ENGINES = ("spark", "local")


@contextmanager
def open_engine(
    name: str,
    cores: int,
    log: Path,
    master: str | None = None,
    memory_gib: int = 4,
    settings: Mapping[str, str] | None = None,
    folders: Sequence[Path] = (),
    say: Callable[[str], None] = print,
) -> Iterator[Engine]:
    """Starts an engine, and stops it at the end of the block.

    Args:
        name: "local" for processes of this machine, or "spark".
        cores: number of cores of this machine, for either engine.
        log: file for Spark's messages.
        master: Spark's master; None is that of spark-submit, or else this machine.
        memory_gib: memory of Spark, in GiB.
        settings: settings of Spark.
        folders: directories that every executor of Spark must be able to write in.
        say: called with a line about Spark's pages.

    Raises:
        ValueError: too many cores.
        EngineError: Spark cannot be started.
    """
    check_processes("--cores", cores)
    if name == "local":
        with local_engine(cores) as engine:
            yield engine
        return
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ  # by spark-submit, which knows the master
    chosen = master or (None if submitted else f"local[{cores}]")
    with spark_engine(chosen, memory_gib, log, dict(settings or {}), folders, say) as spark:
        yield spark
