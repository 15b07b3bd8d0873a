"""Preparation in a session of Spark that a program has, as in a notebook: `dlrm.preproc.run`."""

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm.api.dataset import Dataset, preparation, prepare, say_nothing
from dlrm.api.temporary import temporary_directory
from dlrm.data import layout
from dlrm.data.schema.schema import Schema
from dlrm.data.tables.files import find_tables
from dlrm.data.tables.formats.base import TableFile
from dlrm.files import check_outside
from dlrm.preproc.options import IncrementConfig
from dlrm.preproc.spark.query import SparkQuery
from dlrm.preproc.spark.session import session_engine, shares_folders
from dlrm.remote.cache import Cache
from dlrm.remote.localize import check_path, localized, output_at
from dlrm.remote.publish import Output
from dlrm.remote.uri import Local, Uri, is_uri
from dlrm.serving.wording import in_python
from dlrm.settings import uris_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_NAMES = dict.fromkeys(("input", "spark_table", "spark_sql"), "source") | {"output": "destination"}


def run(
    spark: "SparkSession",
    schema: Schema | str | os.PathLike | Mapping[str, Any],
    source: "DataFrame | str | os.PathLike | Sequence[str | os.PathLike]",
    destination: str | os.PathLike,
    *,
    overwrite: bool = False,
    restart: bool = False,
    verbose: bool = False,
    cache_dir: str | os.PathLike | None = None,
    **options: Any,
) -> Dataset:
    """Makes a dataset in a session of Spark, byte for byte as `dlrm prepare` does.

    The session is used and left as it is; it may be one of Spark Connect. Its executors need this
    package in the same version (`preproc/README.md`, Python on the executors).

    Args:
        spark: a session of Spark 4.
        schema: the meaning of the columns, see `Dataset.from_arrow`.
        source: a data frame of Spark, whose partitions are read in their order; the name of a table
            or view; or files, or folders of them, as paths or URIs. A text that is neither a path,
            with a "/" in it or a file of that name, nor a URI names a table.
        destination: the directory of the dataset, which every executor has to see under the same
            path; or a URI, which executors of a cluster or of Spark Connect read and write
            themselves, `source` included unless Spark has its rows.
        overwrite: replace an earlier dataset at `destination`.
        restart: discard an unfinished run at `destination`; otherwise the same call resumes it, if
            `source` is no data frame.
        verbose: print the stages.
        cache_dir: a directory for copies of what URIs name. The default is one of this machine.
        options: those of `Dataset.from_arrow`; `extend` may be a URI, and a report is written
            unless `report` is False.

    Returns:
        The dataset, which `dlrm.fit` and `dlrm train --dataset` read.

    Raises:
        TypeError: an unknown option.
        ValueError: the schema does not fit the rows, a value cannot be read, there is no such
            table or column, or an option has another type.
        FileExistsError: `destination` already exists.
        OSError: a file cannot be read or written.
        RuntimeError: Spark failed, or an executor cannot run the tasks; the message says on which
            host and why.
    """
    say = print if verbose else say_nothing
    with in_python(_NAMES), ExitStack() as stack:
        held: list[Local] = []

        def fetch(extend: str) -> str:
            if not is_uri(extend):
                return extend
            _, *files = uris_of(IncrementConfig)["extend"].split(", ")
            return localized(extend, Cache.open(cache_dir), held, files)

        made = preparation(run, schema, options, fetch=fetch)
        check_path(destination, "destination")
        kind = layout.KIND if overwrite else False

        def write(path: Path, paths_of: Callable[[list[Any]], list[str]]) -> None:
            tables, query = _rows(source, paths_of, say)
            how = {"replace": overwrite, "restart": restart, "query": query, "say": say}

            def engine(spill: Path) -> Any:
                return nullcontext(session_engine(spark, path, say))

            try:
                prepare(made, tables, path, engine, keep_failed=False, **how)
            except FileExistsError as error:
                hint = "" if overwrite else "; overwrite=True replaces it"
                raise FileExistsError(f"{error}{hint}") from error

        if is_uri(destination) and not shares_folders(spark):
            from dlrm.preproc.spark.stored_files import outlines

            uri, cache = Uri.parse(destination), Cache.open(cache_dir)
            outlined = stack.enter_context(outlines(cache, uri))
            path = stack.enter_context(cache.output(uri))
            output = Output(uri, path, kind)
            write(path, lambda given: outlined(list(map(os.fspath, given)), "input"))
            output.publish()
            return Dataset._at(uri)
        temporary = temporary_directory(cache_dir) if is_uri(destination) else None
        folder = None if temporary is None else temporary.name
        with output_at(destination, "destination", kind, folder) as path:
            write(path, partial(_local, path, held, cache_dir))
    dataset = Dataset(path)
    if temporary:
        weakref.finalize(dataset, temporary.cleanup)
    return dataset


def _rows(
    source: Any, paths_of: Callable[[list[Any]], list[str]], say: Callable[[str], None]
) -> tuple[dict[str, list[TableFile]], SparkQuery | None]:
    """Returns the files of a source, or the query that Spark reads; URIs become paths."""
    if hasattr(source, "sparkSession") and hasattr(source, "write"):
        return {}, SparkQuery(frame=source)
    if isinstance(source, str) and not (is_uri(source) or "/" in source or Path(source).exists()):
        return {}, SparkQuery(table=source)
    given = list(source) if isinstance(source, list | tuple) else [source]
    if wrong := [one for one in given if not isinstance(one, str | os.PathLike)]:
        raise ValueError(
            "source: expected a data frame of Spark, the name of a table, or paths or URIs of "
            f"files, got {type(wrong[0]).__name__}"
        )
    for one in given:
        check_path(one, "source")
    return {"train": find_tables(paths_of(given), say=say)}, None


def _local(
    output: Path, held: list[Local], cache_dir: str | os.PathLike | None, given: list[Any]
) -> list[str]:
    for one in given:
        if not is_uri(one):
            check_outside(output, Path(one))
    if any(map(is_uri, given)):
        given = localized(given, Cache.open(cache_dir), held)
    return [os.path.abspath(one) for one in given]  # as executors work in other directories
