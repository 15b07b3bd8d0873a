"""Turns tables or logs into a dataset: dlrm prepare --schema S --input FILES

    dlrm schema --input sales.parquet --label bought --output schema.yaml
    dlrm prepare --schema schema.yaml --input sales.parquet --output dataset
    dlrm train --dataset dataset --recipe auto --save_checkpoint_path run

Input is files of tables, or directories of them, of the kinds that `--input_format` lists, or with
`--engine spark` a table or query of Spark (`--spark_table`, `--spark_sql`). The schema defines the
meaning of the columns; `--schema criteo` is built in, and reads directories of `day_0`, `day_1`,
... as `preproc/prepare_dataset.sh` does. The same command resumes a run that was stopped.

With `--extend` the rows are a later day: the values of an earlier dataset keep their ids.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm.command_line import flags_of, free_name, shell_line
from dlrm.data.choices import CRITEO_TRANSFORMS, described
from dlrm.data.sources.text_format import TextFormat
from dlrm.files import check_outside
from dlrm.flags import ConfigFlags, Values, run_command
from dlrm.limits import check_processes
from dlrm.preproc.options import OUTPUT_FORMATS, IncrementConfig, RunConfig, SplitConfig
from dlrm.preproc.spark.session import (
    ENGINES,
    SparkConfig,
    local_inputs,
    open_engine,
    reads_by_uri,
)
from dlrm.remote.config import CacheConfig
from dlrm.scripts.common.table_flags import (
    PREPARATION,
    SPARK,
    TEXT_FLAGS,
    FilesConfig,
    say_progress,
    spark_query,
    text_format,
)
from dlrm.settings import REQUIRED, setting, settings_of

if TYPE_CHECKING:
    from dlrm.data.tables.formats.base import TableFile
    from dlrm.preproc.tables.options import TableOptions

_CRITEO = "criteo"
_INPUTS = ("input", "test_input", "validation_input")
_TEST_FRACTION = 0.2


@dataclass(frozen=True)
class PrepareConfig:
    """The rows, their schema, and the dataset; field names are those of the flags."""

    schema: str = setting(
        REQUIRED, "schema.yaml, or criteo for logs in Criteo's format", uri="read"
    )
    output: Path = setting(REQUIRED, "directory to write the dataset to", uri="write")
    input: tuple[str, ...] = setting((), "files, or directories of files", uri="read")
    test_input: tuple[str, ...] = setting((), "files of test rows only", uri="read")
    validation_input: tuple[str, ...] = setting((), "files of validation rows only", uri="read")
    engine: str = setting(
        "local",
        "local: processes of this machine; spark: Spark. Both write the same bytes",
        choices=ENGINES,
    )
    overwrite: bool = setting(False, "replace an earlier dataset once the new one is complete")
    test_fraction: float | None = setting(
        None,
        f"share of the rows to choose at random as test rows; default: {_TEST_FRACTION} "
        "if no other flag splits the rows",
        topic="Division of rows",
    )


@dataclass(frozen=True)
class CriteoConfig:
    """Logs in Criteo's format, whose tables' schema has the like; fields are those of the flags."""

    num_days: int | None = setting(
        None, "number of day files, or of days into which train.txt is cut"
    )
    num_numerical: int | None = setting(None, "number of integer columns; default: 13")
    num_categorical: int | None = setting(None, "number of hexadecimal columns; default: 26")
    frequency_limit: str | None = setting(
        None,
        "number of rows that a value must occur in to get an id: N, or COLUMN:N, comma-separated; "
        "default: 15",
    )
    dictionary_days: str | None = setting(None, "days to fit on, as A-B; default: all")
    numeric_transform: str | None = setting(
        None, f"{described(CRITEO_TRANSFORMS)}; default: readme", choices=CRITEO_TRANSFORMS
    )
    hold_out: bool | None = setting(
        None,
        "hold out the last day, half for testing and half for validation (default)",
    )
    output_format: str | None = setting(
        None,
        "split_binary (default), one file per feature; binary, NVIDIA's rows of 4-byte words",
        choices=OUTPUT_FORMATS,
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    line = ConfigFlags(
        [
            ("Dataset", PrepareConfig),
            ("Division of rows", SplitConfig),
            ("Files", FilesConfig),
            ("Files", TextFormat),
            ("For --schema criteo", CriteoConfig),
            *PREPARATION,
            ("Extension", IncrementConfig),
            *SPARK,
        ],
        ("Dataset", "Files", "Division of rows", "Extension", "Preparation", "For --schema criteo"),
    )
    hint = "the same command resumes the run"
    return run_command(line, _prepare, __doc__, arguments, at_store=_at_store, hint=hint)


def _at_store(values: Values) -> tuple[str, ...]:
    return _INPUTS if reads_by_uri(values, values["output"]) else ()


def _prepare(values: Values) -> int | None:
    from dlrm.variables import return_memory

    return_memory()  # before Arrow is imported, so that copies of the process have its choice
    own = values.config(PrepareConfig)
    if own.schema == _CRITEO:
        return _prepare_logs(own, values)
    for name in settings_of(CriteoConfig):
        if name in values.given:
            raise ValueError(f"--{name}: is for --schema criteo; got --schema {own.schema}")
    with local_inputs(values, _INPUTS, own.output) as local:
        _prepare_tables(local.config(PrepareConfig), local)
    return None


def _prepare_tables(own: PrepareConfig, values: Values) -> None:
    from dlrm.preproc.duckdb_engine import skip_pandas
    from dlrm.preproc.errors import EngineError, TaskError
    from dlrm.preproc.tables.prepare_tables import prepare_tables

    query = spark_query(values, *_INPUTS)
    if query is not None and own.engine != "spark":
        raise ValueError(f"{query.flag}: expected --engine spark, got {own.engine}")
    tables: dict[str, list[TableFile]] = {}
    if own.engine == "local":
        skip_pandas()
    if query is None:
        for path in own.input:
            check_outside(own.output, path)
        tables = {"train": _found(own.input, own, values)}
        for split, given in (("test", own.test_input), ("validation", own.validation_input)):
            if given:
                tables[split] = _found(given, own, values)
    options, engine = _options(own, values, len(tables) > 1), _engine(own, values)
    how = {"replace": own.overwrite, "restart": values["restart"], "query": query}
    try:
        prepare_tables(options, tables, own.output, engine, say=say_progress, **how)
    except FileExistsError as error:
        raise FileExistsError(f"{error}; --overwrite replaces it") from error
    except (TaskError, EngineError) as error:
        raise ValueError(str(error)) from error
    _suggest_training(own.output)


def _found(paths: Sequence[str], own: PrepareConfig, values: Values) -> list["TableFile"]:
    """Returns the files of tables; executors of Spark work in other directories than this one."""
    from dlrm.data.tables.files import find_tables

    inputs = paths if own.engine == "local" else [os.path.abspath(path) for path in paths]
    return find_tables(inputs, values["input_format"], say_progress)


def _options(own: PrepareConfig, values: Values, by_files: bool) -> "TableOptions":
    from dlrm.data.schema.schema import Schema
    from dlrm.preproc.tables.options import TableOptions

    fraction = own.test_fraction
    if fraction is None:
        divided = by_files or values["test_from"] or values["split_column"]
        fraction = 0.0 if divided else _TEST_FRACTION
    return values.config(
        TableOptions,
        schema=Schema.load(own.schema),
        division=values.config(SplitConfig, test_fraction=fraction),
        text=text_format(values),
        output_format=OUTPUT_FORMATS[0],
        increment=values.config(IncrementConfig),
    )


def _engine(own: PrepareConfig, values: Values) -> Callable[[Path], Any]:
    spark, run = values.config(SparkConfig), values.config(RunConfig)
    cores, memory = run.num_cores, run.memory_bytes
    check_processes("--cores", cores)  # before anything is written
    if values["spark_table"] or values["spark_sql"]:
        spark = spark.for_queries
    return lambda spill: open_engine(own.engine, cores, spill, memory, spark, own.output)


def _suggest_training(dataset: Path) -> None:
    command = ["dlrm", "train", "--dataset", str(dataset)]
    command += ["--recipe", "auto", "--save_checkpoint_path", free_name("run")]
    print(f"train on it with\n  {shell_line(command)}")


def _prepare_logs(own: PrepareConfig, values: Values) -> int:
    """Prepares logs in Criteo's format, as `preproc/prepare_dataset.sh` does."""
    from dlrm.preproc.logs import prepare_logs
    from dlrm.preproc.logs.options import DATASET

    files = ("spark_table", "spark_sql", "test_input", "validation_input", "input_format")
    division = (name for name in settings_of(SplitConfig) if name != "seed")
    for name in (*files, *division, *TEXT_FLAGS):
        if name in values.given:
            raise ValueError(f"--{name}: is for schemas of tables; --schema criteo has none")
    if len(own.input) != 1:
        raise ValueError(f"--input: expected one folder of days, got {len(own.input)}")
    names = ["cores", "engine", "seed", "bad_lines", "max_bad_lines", "split_bytes", "master"]
    names += ["output_ordering", "restart", "report", "memory", "memory_gib"]
    names += [*settings_of(CriteoConfig), *settings_of(IncrementConfig)]
    names += [name for name in settings_of(CacheConfig) if name in values]
    arguments = [f"--input_folder={own.input[0]}", f"--output_folder={own.output}"]
    arguments += flags_of({name: values[name] for name in names})
    arguments += [f"--conf={item}" for item in values["conf"]]
    arguments += [f"--write_mode={'overwrite' if own.overwrite else 'errorifexists'}"]
    code = prepare_logs.main(arguments)
    if code == 0:
        _suggest_training(own.output / DATASET)
    return code


if __name__ == "__main__":
    sys.exit(main())
