"""Writes the rows of a table or query of Spark as Parquet files, which are read like any others.

Spark supports lakes, catalogs and formats that we do not: Iceberg, Delta, Hive, JDBC, ORC.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dlrm.data.sources.column_names import check_columns
from dlrm.locks import new_suffix
from dlrm.preproc.engine import Engine
from dlrm.preproc.errors import EngineError
from dlrm.preproc.spark.engine import Batches, SparkEngine

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_BATCHES = 4  # of Spark in a row group, so that several tasks can read a file
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
        return " ".join(next(iter(self.facts().items()), ("--source",)))

    def facts(self) -> dict[str, str]:
        """Returns the flag and its value, which determine the rows; nothing for a data frame."""
        given = {"--spark_table": self.table, "--spark_sql": self.sql}
        return {flag: value for flag, value in given.items() if value is not None}


def read_query(
    engine: Engine, query: SparkQuery, columns: Sequence[str], folder: Path
) -> dict[str, Any]:
    """Writes the rows of a query as Parquet, one file per partition with rows, in their order.

    Two runs have the same order if the query determines it, as `ORDER BY` unique columns does.
    Files of tasks that fail or run twice do not count.

    Args:
        folder: directory for the files, in which executors write.

    Returns:
        `files`, and for the `manifest` the query, the number of `partitions`, the version of
        `spark`, and the `snapshot` of an Iceberg or Delta table.

    Raises:
        ValueError: the engine is not Spark, there is no such table or column, or the query is
            invalid.
        EngineError: Spark failed.
    """
    with _selected(engine, query, columns) as (spark, frame, version):
        written = spark.batches(frame, partial(_write_partition, str(folder / "part-")))
        files = [str(folder / name) for batch in written for name in batch.column(0).to_pylist()]
        spark.adopt_new()
    if not files:
        raise ValueError("expected rows, got none")
    facts = {"partitions": len(files), "spark": frame.sparkSession.version}
    facts |= {} if version is None else {"snapshot": version}
    return {"files": files, "manifest": query.facts() | facts}


def fetch_rows(
    engine: Engine, query: SparkQuery, columns: Sequence[str], folder: Path, optional: Sequence[str]
) -> None:
    """Writes the rows of a query as Parquet on this machine, in the order of the partitions.

    Args:
        optional: columns to read if the query has them.

    Raises:
        ValueError, EngineError: see `read_query`.
    """
    with _selected(engine, query, columns, optional) as (spark, frame, _):
        _write(spark.batches(frame, iter), folder / "rows.parquet")


@contextmanager
def _selected(
    engine: Engine, query: SparkQuery, columns: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[tuple[SparkEngine, "DataFrame", int | None]]:
    """Yields the engine, the rows and the version of their table; Spark's errors get one line."""
    if not isinstance(engine, SparkEngine):
        raise ValueError(f"{query.flag}: expected --engine spark, got local")
    from pyspark.errors import AnalysisException

    try:
        session = engine.session if query.frame is None else query.frame.sparkSession
        version = _version(session, query.table) if query.table else None
        of_version = "" if version is None else f" VERSION AS OF {version}"
        text = query.sql or f"SELECT * FROM {query.table}{of_version}"
        frame = session.sql(text) if query.frame is None else query.frame
        wanted = [*columns, *(name for name in optional if name in frame.columns)]
        check_columns(query.flag, frame.columns, wanted)
        names = ("`" + name.replace("`", "``") + "`" for name in wanted)
        yield engine, frame.select(*names), version
    except AnalysisException as error:  # errors in a query, such as ParseException
        said = next((line for line in str(error).splitlines() if line.strip()), "")
        raise ValueError(f"{query.flag}: {said.strip()}") from None
    except EngineError as error:
        raise EngineError(f"{query.flag}: {error}") from error


def _version(session: "SparkSession", table: str) -> int | None:
    """Returns the snapshot of an Iceberg table or the version of a Delta table, otherwise None."""
    described = session.sql(f"DESCRIBE TABLE EXTENDED {table}").collect()
    providers = [row["data_type"] for row in described if row["col_name"] == "Provider"]
    newest = _VERSIONS.get(providers[-1].lower()) if providers else None
    rows = session.sql(newest.format(table)).collect() if newest else []
    return int(rows[0][0]) if rows else None


def _write_partition(prefix: str, batches: Batches) -> Iterator[pa.RecordBatch]:
    """Writes the rows of a partition as a file of this attempt; returns its name, if it has any."""
    path = Path(f"{prefix}{new_suffix()}.parquet")
    if _write(iter(batches), path):
        yield pa.record_batch({"file": [path.name]})


def _write(batches: Iterator[pa.RecordBatch], path: Path) -> bool:
    """Writes batches, if there are any, without Arrow's types, as Spark's own files are."""
    import pyarrow.parquet as pq

    batches = filter(len, batches)
    if (first := next(batches, None)) is None:
        return False
    batches = chain([first], batches)
    with pq.ParquetWriter(path, first.schema, store_schema=False) as writer:
        while group := [*islice(batches, _BATCHES)]:
            writer.write_table(pa.Table.from_batches(group))
    return True
