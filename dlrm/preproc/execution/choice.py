"""Opens the engine that a command's flags name."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlrm.flags import UsageError
from dlrm.limits import check_processes
from dlrm.preproc.engine import Engine
from dlrm.preproc.execution.spark_engine import is_on_cluster, spark_engine
from dlrm.remote.uri import Uri, is_uri
from dlrm.settings import setting

ENGINES = ("spark", "local")

# Queries run in the JVM and need its optimizing compiler; tasks alone do not.
_COMPILED = [f"spark.{who}.defaultJavaOptions=-XX:+UseSerialGC" for who in ("driver", "executor")]


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

    def for_queries(self) -> "SparkConfig":
        """Returns the same with an optimizing compiler, unless settings say otherwise."""
        return replace(self, conf=(*_COMPILED, *self.conf))


@dataclass(frozen=True)
class StoreConfig:
    """The exchange of files between tasks; field names are those of the flags."""

    through_store: bool | None = setting(
        None,
        "tasks read --input and exchange files through the store of --output, which needs no "
        "common folder; default: if --output is a URI and Spark's master is not on this machine",
    )


def goes_through_store(values: Mapping[str, Any], output: str) -> bool:
    """Returns whether tasks exchange files through the store of the output.

    Args:
        values: the flags of `StoreConfig` and `SparkConfig`, and `engine`.
        output: name of the flag of the output.

    Raises:
        ValueError: they cannot, as the output is a local path.
    """
    chosen, place = values["through_store"], values[output]
    if not is_uri(place):
        if chosen:
            raise ValueError(f"--through_store: expected a URI as --{output}, got {place}")
        return False
    if chosen is not None:
        return chosen
    return values["engine"] == "spark" and is_on_cluster(values["master"])


@contextmanager
def open_engine(
    name: str,
    cores: int,
    log: Path,
    spill: Path,
    memory: int | None = None,
    spark: SparkConfig | None = None,
    folders: Sequence[Path | Uri] = (),
    say: Callable[[str], None] = print,
) -> Iterator[Engine]:
    """Starts an engine, and stops it at the end of the block.

    Args:
        name: "local" for processes of this machine, or "spark".
        cores: number of cores of this machine, for either engine.
        spill: directory for what memory does not hold, of this machine's engine.
        memory: bytes of memory of it for sums and sorting.
        spark: the session of Spark; None is one with the defaults.
        log, folders, say: see `spark_engine`.

    Raises:
        ValueError: too many cores.
        EngineError: Spark cannot be started.
    """
    check_processes("--cores", cores)
    if name == "local":
        from dlrm.preproc.duckdb_engine import local_engine

        with local_engine(cores, spill, memory, forked=True) as engine:
            yield engine
        return
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ  # by spark-submit, which knows the master
    spark = spark or SparkConfig()
    master = spark.master or (None if submitted else f"local[{cores}]")
    settings = dict(item.split("=", 1) for item in spark.conf)
    with spark_engine(master, spark.memory_gib, log, settings, folders, say) as started:
        yield started
