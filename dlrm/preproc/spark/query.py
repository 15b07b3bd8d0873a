"""Writes the rows of a table or query of Spark as Parquet files, which are read like any others.

Spark supports lakes, catalogs and formats that we do not: Iceberg, Delta, Hive, JDBC, ORC.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dlrm.data.sources.column_names import check_columns
from dlrm.locks import new_suffix
from dlrm.preproc.engine import Engine
from dlrm.preproc.errors import EngineError
from dlrm.preproc.spark.engine import Batches, SparkEngine, cells_of, packed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_GROUP_BYTES = 16 << 20  # of a row group, so that several tasks can read a file
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
    engine: Engine, query: SparkQuery, columns: Sequence[str], folder: Path
) -> dict[str, Any]:
    """Writes the rows of a query as Parquet, one file per partition with rows.

    The rows are in the order of the partitions. Two runs have the same order if the query
    determines it, as `ORDER BY` unique columns does; otherwise Spark may divide and order rows
    differently. Files of tasks that fail or run twice do not count.

    Args:
        folder: directory for the files, in which executors write.

    Returns:
        `files`, in the order of their rows; and for the `manifest` the query, the number of
        `partitions` with rows, the version of `spark`, and the `snapshot` of an Iceberg or Delta
        table.

    Raises:
        ValueError: the engine is not Spark, there is no such table or column, or the query is
            invalid.
        EngineError: Spark failed.
    """
    engine = _spark(engine, query)
    with _failures(query):
        frame, version = _selected(engine, query, columns)
        task = engine.opened(partial(_write_partition, str(folder / "part-")))
        files = [cell.decode() for cell in engine.cells(frame, task)]
    if not files:
        raise ValueError("expected rows, got none")
    engine.files.adopt_new()
    facts = {"partitions": len(files), "spark": frame.sparkSession.version}
    facts |= {} if version is None else {"snapshot": version}
    return {"files": [str(folder / name) for name in files], "manifest": query.facts() | facts}


def fetch_rows(
    engine: Engine, query: SparkQuery, columns: Sequence[str], folder: Path, optional: Sequence[str]
) -> None:
    """Writes the rows of a query as Parquet on this machine, in the order of the partitions.

    Args:
        optional: columns to read if the query has them.

    Raises:
        ValueError, EngineError: see `read_query`.
    """
    engine = _spark(engine, query)
    with _failures(query):
        frame, _ = _selected(engine, query, columns, optional)
        batches = (
            batch for cell in engine.cells(frame, packed) for batch in pa.ipc.open_stream(cell)
        )
        _write(batches, folder / "rows.parquet")


def _spark(engine: Engine, query: SparkQuery) -> SparkEngine:
    if not isinstance(engine, SparkEngine):
        raise ValueError(f"{query.flag}: expected --engine spark, got local")
    return engine


def _selected(
    engine: SparkEngine, query: SparkQuery, columns: Sequence[str], optional: Sequence[str] = ()
) -> tuple["DataFrame", int | None]:
    """Returns the rows, and the version of their table."""
    session = engine.session if query.frame is None else query.frame.sparkSession
    version = _version(session, query.table) if query.table else None
    frame = _frame(session, query, version)
    wanted = [*columns, *(name for name in optional if name in frame.columns)]
    check_columns(query.flag, frame.columns, wanted)
    return frame.select(*("`" + name.replace("`", "``") + "`" for name in wanted)), version


def _write_partition(prefix: str, batches: Batches) -> Iterator[pa.RecordBatch]:
    """Writes the rows of a partition as a file of this attempt; returns its name, if it has any."""
    path = Path(f"{prefix}{new_suffix()}.parquet")
    if _write(iter(batches), path):
        yield from cells_of([path.name.encode()])


def _write(batches: Iterator[pa.RecordBatch], path: Path) -> bool:
    """Writes batches, if there are any, without Arrow's types, as Spark's own files are."""
    import pyarrow.parquet as pq

    groups = _groups(batches)
    if (first := next(groups, None)) is None:
        return False
    with pq.ParquetWriter(path, first.schema, store_schema=False) as writer:
        for group in chain([first], groups):
            writer.write_table(group)
    return True


def _groups(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yields batches as row groups, and none without rows."""
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
def _failures(query: SparkQuery) -> Iterator[None]:
    """Turns Spark's errors into one line: a ValueError if the query is at fault."""
    from pyspark.errors import AnalysisException

    try:
        yield
    except AnalysisException as error:  # errors in a query, such as ParseException
        raise ValueError(f"{query.flag}: {_first_line(error)}") from None
    except EngineError as error:
        raise EngineError(f"{query.flag}: {error}") from error


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
