"""Flags of commands that read tables and queries of Spark."""

from absl import flags

from dlrm.preproc.execution.spark_query import SparkQuery

FLAGS = flags.FLAGS
# Queries run in the JVM and need its optimizing compiler; tasks alone do not.
_COMPILED = {
    f"spark.{who}.defaultJavaOptions": "-XX:+UseSerialGC" for who in ("driver", "executor")
}


def define_spark_flags() -> None:
    """Defines the flags of a Spark query and session."""
    flags.DEFINE_string("spark_table", None, "Spark table or view to read instead of --input")
    flags.DEFINE_string("spark_sql", None, "Spark SQL query to read instead of --input")
    flags.DEFINE_string("master", None, "Spark master")
    flags.DEFINE_integer("memory_gib", 4, "memory of Spark, in GiB", lower_bound=1)
    flags.DEFINE_multi_string("conf", [], "NAME=VALUE, a setting of Spark")


def spark_query(*others: str) -> SparkQuery | None:
    """Returns Spark's query, or None if files are read.

    Args:
        others: flags that only files have.

    Raises:
        ValueError: both a table and a query are given, or one of them with one of `others`.
    """
    if FLAGS.spark_table is None and FLAGS.spark_sql is None:
        return None
    query = SparkQuery(FLAGS.spark_table, FLAGS.spark_sql)
    for name in others:
        if FLAGS[name].present:
            raise ValueError(f"--{name}: expected no {query.flag} beside it, got both")
    return query


def spark_settings(query: SparkQuery | None) -> dict[str, str]:
    """Returns the settings of a session, with an optimizing compiler for a query.

    Raises:
        ValueError: a setting is not of the form NAME=VALUE.
    """
    if wrong := [item for item in FLAGS.conf if "=" not in item]:
        raise ValueError(f"--conf: expected NAME=VALUE, got {wrong[0]!r}")
    settings = {} if query is None else dict(_COMPILED)
    return settings | dict(item.split("=", 1) for item in FLAGS.conf)
