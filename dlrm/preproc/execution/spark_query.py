"""Reads a table of Spark, or a query, into Parquet files that tasks read like any other.

Spark knows lakes, catalogs and formats that we need not know: Iceberg, Delta, Hive, JDBC, ORC.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm.preproc.execution.engines import Engine, EngineError
from dlrm.preproc.execution.spark_engine import SparkEngine

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_GROUP_BYTES = 16 << 20  # of a row group, so that a file can be read by several tasks
_VERSIONS = {  # provider of a table -> its newest version
    "iceberg": "SELECT snapshot_id FROM {}.snapshots ORDER BY committed_at DESC LIMIT 1",
    "delta": "SELECT version FROM (DESCRIBE HISTORY {} LIMIT 1)",
}


@dataclass(frozen=True)
class SparkQuery:
    """Table or query that Spark reads.

    Attributes:
        table: the name of a table or view, with its catalog and namespace where it has them.
        sql: a query. One of the two is None.
    """

    table: str | None = None
    sql: str | None = None

    def __post_init__(self) -> None:
        if (self.table is None) == (self.sql is None):
            raise ValueError("--spark_table, --spark_sql: expected one of the two")

    @property
    def flag(self) -> str:
        """The flag with its value."""
        return f"--spark_table {self.table}" if self.table else f"--spark_sql {self.sql}"

    def facts(self) -> dict[str, str]:
        """Returns the flag and its value, which determine the rows."""
        return {"--spark_table": self.table} if self.table else {"--spark_sql": self.sql or ""}


def read_query(
    engine: Engine,
    query: SparkQuery,
    columns: Sequence[str],
    folder: Path,
    optional: Sequence[str] = (),
) -> dict[str, Any]:
    """Writes the rows of a query as Parquet, a file for each partition that has rows.

    The rows are those of the partitions, in their order. Two runs have the same order where the
    query gives it, as `ORDER BY` unique columns does; else Spark may divide and order rows anew.
    Spark writes the files itself, so that a task which fails or runs twice leaves its rows once.

    Args:
        engine: Spark.
        query: rows to read.
        columns: which of its columns.
        folder: for the files, on storage that every node sees; its content is replaced.
        optional: columns that are read where the query has them.

    Returns:
        `files`, in the order of their rows; and for the `manifest` the query, how many `partitions`
        had rows, the version of `spark`, and of a table of Iceberg or Delta the `snapshot` that was
        read.

    Raises:
        ValueError: the engine is not Spark, there is no such table or column, or the query is none.
        EngineError: Spark failed.
    """
    if not isinstance(engine, SparkEngine):
        raise ValueError(f"{query.flag}: expected --engine spark, got local")
    with _failures(query):
        session = engine.session()
        version = _version(session, query.table) if query.table else None
        frame = _frame(session, query, version)
        wanted = [*columns, *(name for name in optional if name in frame.columns)]
        _check_columns(query, frame.columns, wanted)
        writer = frame.select(*map(_quoted, wanted)).write.mode("overwrite")
        writer.option("parquet.block.size", _GROUP_BYTES).parquet(folder.as_uri())
    files = sorted(folder.glob("part-*.parquet"))  # by the number of the partition
    facts = {"partitions": len(files), "spark": session.version}
    facts |= {} if version is None else {"snapshot": version}
    return {"files": [str(path) for path in files], "manifest": query.facts() | facts}


@contextmanager
def _failures(query: SparkQuery) -> Iterator[None]:
    """Turns Spark's errors into one line: a ValueError where the query is at fault."""
    from py4j.protocol import Py4JError
    from pyspark.errors import AnalysisException, PySparkException

    try:
        yield
    except AnalysisException as error:  # of what a query says, ParseException among them
        raise ValueError(f"{query.flag}: {_first_line(error)}") from None
    except (PySparkException, Py4JError) as error:
        raise EngineError(f"{query.flag}: Spark failed: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "").strip()


def _frame(session: "SparkSession", query: SparkQuery, version: int | None) -> "DataFrame":
    """Returns what a query gives, before any of it is computed."""
    if query.sql is not None:
        return session.sql(query.sql)
    if version is not None:
        return session.sql(f"SELECT * FROM {query.table} VERSION AS OF {version}")
    return session.table(query.table or "")


def _version(session: "SparkSession", table: str) -> int | None:
    """Returns the snapshot of a table of Iceberg, or the version of one of Delta; else None."""
    described = session.sql(f"DESCRIBE TABLE EXTENDED {table}").collect()
    providers = [row["data_type"] for row in described if row["col_name"] == "Provider"]
    newest = _VERSIONS.get(providers[-1].lower()) if providers else None
    found = session.sql(newest.format(table)).collect() if newest else []
    return int(found[0][0]) if found else None


def _check_columns(query: SparkQuery, names: Sequence[str], wanted: Sequence[str]) -> None:
    for name in wanted:
        if list(names).count(name) != 1:
            shown = ", ".join(names[:20])
            problem = "two columns are called" if name in names else "no column"
            raise ValueError(f"{query.flag}: {problem} {name!r}; the columns are {shown}")


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
