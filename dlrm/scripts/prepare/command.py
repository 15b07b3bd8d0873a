"""Turns tables or logs into a dataset."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlrm.command_line import flags_of, free_name, say, shell_line
from dlrm.data.schema.schema import Schema
from dlrm.data.tables.files import find_tables
from dlrm.data.tables.formats.base import TableFile
from dlrm.files import check_outside
from dlrm.flags import Values
from dlrm.limits import check_processes
from dlrm.preproc.duckdb_engine import skip_pandas
from dlrm.preproc.errors import EngineError, TaskError
from dlrm.preproc.logs import prepare_logs
from dlrm.preproc.logs.options import DATASET
from dlrm.preproc.options import OUTPUT_FORMATS, IncrementConfig, RunConfig, SplitConfig
from dlrm.preproc.spark.query import SparkQuery
from dlrm.preproc.spark.session import SparkConfig, local_inputs, open_engine
from dlrm.preproc.tables.options import TableOptions
from dlrm.preproc.tables.prepare_tables import prepare_tables
from dlrm.remote.config import CacheConfig
from dlrm.scripts.common.spark_flags import spark_query
from dlrm.scripts.common.table_flags import TEXT_FLAGS, preparation, text_format
from dlrm.scripts.prepare.flags import (
    CRITEO,
    DEFAULT_TEST_FRACTION,
    INPUTS,
    CriteoConfig,
    PrepareConfig,
)
from dlrm.settings import settings_of

_DIVISION = tuple(name for name in settings_of(SplitConfig) if name != "seed")
_LOG_FLAGS = ("cores", "engine", "seed", "bad_lines", "max_bad_lines", "split_bytes", "master")


def run(values: Values) -> int | None:
    own = values.config(PrepareConfig)
    if own.schema == CRITEO:
        return _prepare_logs(values)
    for name in settings_of(CriteoConfig):
        if name in values.given:
            raise ValueError(f"--{name}: is for --schema criteo; got --schema {own.schema}")
    with local_inputs(values, INPUTS, own.output) as local:
        _prepare(local, own.output)
    return None


def _prepare(values: Values, output: Path) -> None:
    own = values.config(PrepareConfig)
    query, tables = _query(values), {}
    if values["engine"] == "local":
        skip_pandas()
    if query is None:
        for path in own.input:
            check_outside(output, path)
        tables = {"train": _found(own.input, values)}
        for split, given in (("test", own.test_input), ("validation", own.validation_input)):
            if given:
                tables[split] = _found(given, values)
    options = _options(values, len(tables) > 1)
    how = {"replace": own.overwrite, "restart": values["restart"], "query": query, "say": say}
    try:
        prepare_tables(options, tables, output, _engine(values, output), **how)
    except FileExistsError as error:
        raise FileExistsError(f"{error}; --overwrite replaces it") from error
    except (TaskError, EngineError) as error:
        raise ValueError(str(error)) from error
    _suggest_training(output)


def _found(paths: Sequence[str], values: Values) -> list[TableFile]:
    """Returns the files of tables; executors of Spark work in other directories than this one."""
    is_local = values["engine"] == "local"
    inputs = paths if is_local else [os.path.abspath(path) for path in paths]
    return find_tables(inputs, values["input_format"], say)


def _suggest_training(dataset: Path) -> None:
    command = ["dlrm", "train", "--dataset", str(dataset)]
    command += ["--recipe", "auto", "--save_checkpoint_path", free_name("run")]
    print(f"train on it with\n  {shell_line(command)}")


def _query(values: Values) -> SparkQuery | None:
    """Returns Spark's query, or None if files are read."""
    query = spark_query(values, "input", "test_input", "validation_input")
    if query is not None and values["engine"] != "spark":
        raise ValueError(f"{query.flag}: expected --engine spark, got {values['engine']}")
    return query


def _options(values: Values, by_files: bool) -> TableOptions:
    fraction = values["test_fraction"]
    if fraction is None:
        divided = by_files or values["test_from"] or values["split_column"]
        fraction = 0.0 if divided else DEFAULT_TEST_FRACTION
    options: dict[str, Any] = preparation(values) | {"output_format": OUTPUT_FORMATS[0]}
    options["increment"] = values.config(IncrementConfig)
    return TableOptions(
        Schema.load(values["schema"]),
        values.config(SplitConfig, test_fraction=fraction),
        text_format(values),
        **options,
    )


def _engine(values: Values, output: Path):
    spark, cores = values.config(SparkConfig), values.config(RunConfig).num_cores
    check_processes("--cores", cores)  # before anything is written
    if values["spark_table"] or values["spark_sql"]:
        spark = spark.for_queries
    memory = values.config(RunConfig).memory_bytes
    return lambda spill: open_engine(values["engine"], cores, spill, memory, spark, output)


def _prepare_logs(values: Values) -> int:
    """Prepares logs in Criteo's format, as `preproc/prepare_dataset.sh` does."""
    files = ("spark_table", "spark_sql", "test_input", "validation_input", "input_format")
    for name in (*files, *_DIVISION, *TEXT_FLAGS):
        if name in values.given:
            raise ValueError(f"--{name}: is for schemas of tables; --schema criteo has none")
    if len(values["input"]) != 1:
        raise ValueError(f"--input: expected one folder of days, got {len(values['input'])}")
    arguments = [f"--input_folder={values['input'][0]}", f"--output_folder={values['output']}"]
    arguments += flags_of({n: values[n] for n in (*_LOG_FLAGS, *settings_of(CriteoConfig))})
    arguments += [f"--conf={item}" for item in values["conf"]]
    names = ["output_ordering", "restart", "report", "memory", "memory_gib"]
    names += settings_of(IncrementConfig)
    names += (name for name in settings_of(CacheConfig) if name in values)
    arguments += flags_of({name: values[name] for name in names})
    arguments += [f"--write_mode={'overwrite' if values['overwrite'] else 'errorifexists'}"]
    code = prepare_logs.main(arguments)
    if code == 0:
        _suggest_training(values["output"] / DATASET)
    return code
