"""Flags of commands that read tables, or queries of Spark, and prepare them."""

import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlrm.command_line import name_standard_output, say
from dlrm.data.choices import TABLE_FORMATS
from dlrm.data.sources.text_format import TextFormat
from dlrm.flags import Values
from dlrm.preproc.options import PreparationOptions, RunConfig
from dlrm.preproc.spark.session import SparkConfig
from dlrm.settings import setting, settings_of

if TYPE_CHECKING:
    from dlrm.preproc.spark.query import SparkQuery

TEXT_FLAGS = tuple(settings_of(TextFormat))
# Options of preparation that commands whose flags determine the schema do not have.
NOT_OPTIONS = ("output_ordering", "split_bytes", "output_format")


@dataclass(frozen=True)
class FilesConfig:
    """The files of tables; field names are those of the flags."""

    input_format: str | None = setting(
        None, "kind of the files; default: by their names and content", choices=TABLE_FORMATS
    )


@dataclass(frozen=True)
class QueryConfig:
    """A query of Spark; field names are those of the flags."""

    spark_table: str | None = setting(None, "Spark table or view to read instead of --input")
    spark_sql: str | None = setting(None, "Spark SQL query to read instead of --input")


PREPARATION = (("Preparation", PreparationOptions), ("Preparation", RunConfig))
SPARK = (("Spark", QueryConfig), ("Spark", SparkConfig))


def text_format(values: Values) -> TextFormat:
    """Returns the format of CSV that the flags describe."""
    given = values["delimiter"]
    escaped = given is not None and re.fullmatch(r"\\(t|x[01][0-9a-fA-F])", given)
    if escaped:  # which a shell does not turn into a character
        return values.config(TextFormat, delimiter=given.encode().decode("unicode_escape"))
    return values.config(TextFormat)


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


def say_progress(line: object) -> None:
    """Prints a line before the output is complete, of which a reader that has left stops nothing.

    Once its output is written, the command ends with the error of printing its last lines.
    """
    try:
        say(line)
    except OSError:
        with suppress(OSError):
            sys.stdout.close()  # with what cannot be written, which a new process would flush again
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        name_standard_output()
