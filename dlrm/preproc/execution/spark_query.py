"""Reads a Spark table or query into Parquet files, which tasks read like any others.

Spark supports lakes, catalogs and formats that we do not: Iceberg, Delta, Hive, JDBC, ORC.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm.data.sources.column_names import check_columns
from dlrm.locks import new_suffix
from dlrm.preproc.engine import Engine
from dlrm.preproc.errors import EngineError
from dlrm.preproc.execution.spark_engine import (
    SparkEngine,
    causes_of,
    error_of_task,
    spark_errors,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

Write = Callable[["Iterator[pa.RecordBatch]"], "Iterator[pa.RecordBatch]"]
_GROUP_BYTES = 16 << 20  # of a row group, so that several tasks can read a file
_WRITTEN = "partition int, name string"  # what `_write_partition` returns
_TIMES = "spark.sql.parquet.outputTimestampType"  # so that times are written in UTC
_VERSIONS = {  # provider of a table -> its newest version
    "iceberg": "SELECT snapshot_id FROM {}.snapshots ORDER BY committed_at DESC LIMIT 1",
    "delta": "SELECT version FROM (DESCRIBE HISTORY {} LIMIT 1)",
}


@dataclass(frozen=True)
class SparkQuery:
    """A table or query that Spark reads.

    Attributes:
        table: name of a table or view, with its catalog and namespace, if any.
        sql: a query.
        frame: a data frame of Spark. One of the three is given.
    """

    table: str | None = None
    sql: str | None = None
    frame: "DataFrame | None" = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if sum(one is not None for one in (self.table, self.sql, self.frame)) != 1:
            raise ValueError("--spark_table, --spark_sql: expected one of the two")

    @property
    def flag(self) -> str:
        """Returns the flag with its value."""
        if self.frame is not None:
            return "--source"
        return f"--spark_table {self.table}" if self.table else f"--spark_sql {self.sql}"

    def facts(self) -> dict[str, str]:
        """Returns the flag and its value, which determine the rows; nothing for a data frame."""
        if self.frame is not None:
            return {}
        return {"--spark_table": self.table} if self.table else {"--spark_sql": self.sql or ""}


def read_query(
    engine: Engine,
    query: SparkQuery,
    columns: Sequence[str],
    folder: Path,
    optional: Sequence[str] = (),
    packed: Callable[[Write], Write] | None = None,
) -> dict[str, Any]:
    """Writes the rows of a query as Parquet, one file per partition with rows.

    The rows are in the order of the partitions. Two runs have the same order if the query
    determines it, as `ORDER BY` unique columns does; otherwise Spark may divide and order rows
    differently. Spark writes the files itself, or keeps the answers of the tasks that do, so a task
    that fails or runs twice leaves its rows once.

    Args:
        folder: directory for the files, on storage that every node mounts; its content is replaced.
        optional: columns to read if the query has them.
        packed: lets a task write into `folder` where nodes do not mount it; the folder then may
            have other files as well, of attempts that do not count.

    Returns:
        `files`, in the order of their rows; and for the `manifest` the query, the number of
        `partitions` with rows, the version of `spark`, and the `snapshot` of an Iceberg or Delta
        table.

    Raises:
        ValueError: the engine is not Spark, there is no such table or column, or the query is
            invalid.
        EngineError: Spark failed.
    """
    if not isinstance(engine, SparkEngine):
        raise ValueError(f"{query.flag}: expected --engine spark, got local")
    with _failures(query):
        session = engine.session() if query.frame is None else query.frame.sparkSession
        version = _version(session, query.table) if query.table else None
        frame = _frame(session, query, version)
        wanted = [*columns, *(name for name in optional if name in frame.columns)]
        check_columns(query.flag, frame.columns, wanted)
        frame = frame.select(*("`" + name.replace("`", "``") + "`" for name in wanted))
        if packed is not None:
            write = packed(partial(_write_partition, folder=folder))
            rows = sorted(engine.collect("spark", write, frame, _WRITTEN))  # by partition
            files = [folder / row.name for row in rows]
        else:
            with _setting(session, _TIMES, "TIMESTAMP_MICROS"):
                writer = frame.write.mode("overwrite").option("parquet.block.size", _GROUP_BYTES)
                writer.parquet(f"file://{folder}")  # which Hadoop does not unquote
            files = sorted(folder.glob("part-*.parquet"))  # by the number of the partition
    if not files:
        raise ValueError("expected rows, got none")
    facts = {"partitions": len(files), "spark": session.version}
    facts |= {} if version is None else {"snapshot": version}
    return {"files": [str(path) for path in files], "manifest": query.facts() | facts}


def _write_partition(
    batches: "Iterator[pa.RecordBatch]", folder: Path
) -> "Iterator[pa.RecordBatch]":
    """Writes the rows of a partition as a file of this attempt, if there are any.

    Arrow's types are not stored, so that the columns have those of Spark's own files.

    Returns:
        The number of the partition and the name of the file, see `_WRITTEN`.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyspark import TaskContext

    context, groups = TaskContext.get(), _groups(batches)
    assert context is not None
    if (first := next(groups, None)) is None:
        return iter(())
    number = context.partitionId()
    name = f"part-{number:05d}-{new_suffix()}.parquet"
    with pq.ParquetWriter(folder / name, first.schema, store_schema=False) as writer:
        for group in chain([first], groups):
            writer.write_table(group)
    columns = {"partition": pa.array([number], pa.int32()), "name": pa.array([name])}
    return iter([pa.RecordBatch.from_pydict(columns)])


def _groups(batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.Table]":
    """Yields batches as row groups, and none without rows."""
    import pyarrow as pa

    held: list[pa.RecordBatch] = []
    size = 0
    for batch in filter(len, batches):
        held.append(batch)
        size += batch.nbytes
        if size >= _GROUP_BYTES:
            yield pa.Table.from_batches(held)
            held, size = [], 0
    if held:
        yield pa.Table.from_batches(held)


@contextmanager
def _setting(session: "SparkSession", name: str, value: str) -> Iterator[None]:
    """Changes a setting of a session, which may be the user's, within the block."""
    before = session.conf.get(name)
    session.conf.set(name, value)
    try:
        yield
    finally:
        session.conf.set(name, before or "")


@contextmanager
def _failures(query: SparkQuery) -> Iterator[None]:
    """Turns Spark's errors into one line: a ValueError if the query is at fault."""
    from pyspark.errors import AnalysisException, PySparkException

    try:
        yield
    except AnalysisException as error:  # errors in a query, such as ParseException
        raise ValueError(f"{query.flag}: {_first_line(error)}") from None
    except spark_errors() as error:
        if known := error_of_task(str(error)):
            raise known from None
        causes = "" if isinstance(error, PySparkException) else causes_of(str(error))
        cause = causes or _first_line(error)
        raise EngineError(f"{query.flag}: Spark failed: {cause}") from error


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "").strip()


def _frame(session: "SparkSession", query: SparkQuery, version: int | None) -> "DataFrame":
    """Returns a query's data frame, without computing it."""
    if query.frame is not None:
        return query.frame
    if query.sql is not None:
        return session.sql(query.sql)
    if version is not None:
        return session.sql(f"SELECT * FROM {query.table} VERSION AS OF {version}")
    return session.table(query.table or "")


def _version(session: "SparkSession", table: str) -> int | None:
    """Returns the snapshot of an Iceberg table or the version of a Delta table, otherwise None."""
    described = session.sql(f"DESCRIBE TABLE EXTENDED {table}").collect()
    providers = [row["data_type"] for row in described if row["col_name"] == "Provider"]
    newest = _VERSIONS.get(providers[-1].lower()) if providers else None
    rows = session.sql(newest.format(table)).collect() if newest else []
    return int(rows[0][0]) if rows else None
