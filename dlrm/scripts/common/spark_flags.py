"""Flags of commands that read tables and queries of Spark."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlrm.flags import Values
from dlrm.preproc.spark.session import SparkConfig
from dlrm.settings import setting

if TYPE_CHECKING:
    from dlrm.preproc.spark.query import SparkQuery


@dataclass(frozen=True)
class QueryConfig:
    """A query of Spark; field names are those of the flags."""

    spark_table: str | None = setting(None, "Spark table or view to read instead of --input")
    spark_sql: str | None = setting(None, "Spark SQL query to read instead of --input")


SPARK = (("Spark", QueryConfig), ("Spark", SparkConfig))


def spark_query(values: Values, *others: str) -> "SparkQuery | None":
    """Returns Spark's query, or None if files are read.

    Args:
        others: flags that only files have.

    Raises:
        ValueError: both a table and a query are given, or one of them with one of `others`.
    """
    if values["spark_table"] is None and values["spark_sql"] is None:
        return None
    from dlrm.preproc.spark.query import SparkQuery  # imports Arrow

    query = SparkQuery(values["spark_table"], values["spark_sql"])
    for name in others:
        if name in values.given:
            raise ValueError(f"--{name}: expected no {query.flag} beside it, got both")
    return query
