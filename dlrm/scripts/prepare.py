"""Turns tables or logs into a dataset: python -m dlrm.scripts.prepare --schema S --input FILES

    python -m dlrm.scripts.schema --input sales.parquet --label bought --output schema.yaml
    python -m dlrm.scripts.prepare --schema schema.yaml --input sales.parquet --output dataset
    python -m dlrm.scripts.main --dataset dataset --recipe auto --save_checkpoint_path run

Input is files of tables, or directories of them, of the kinds that `--input_format` lists, or with
`--engine spark` a table or query of Spark (`--spark_table`, `--spark_sql`). The schema defines the
meaning of the columns; `--schema criteo` is built in, and reads directories of `day_0`, `day_1`,
... as `preproc/prepare_dataset.sh` does. The same command resumes a run that was stopped.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm.command_line import flags_of, say, shell_line
from dlrm.data.sources.text_format import TextFormat
from dlrm.data.tables.files import find_tables
from dlrm.data.transform.numeric_transforms import CRITEO_TRANSFORMS, described
from dlrm.data.transform.schema import Schema
from dlrm.files import check_outside
from dlrm.flags import ConfigFlags, Values, run_command
from dlrm.limits import check_processes
from dlrm.preproc import prepare_logs
from dlrm.preproc.execution.choice import ENGINES, SparkConfig, open_engine
from dlrm.preproc.execution.engines import EngineError, TaskError
from dlrm.preproc.execution.spark_query import SparkQuery
from dlrm.preproc.execution.work_folder import shared_folders
from dlrm.preproc.prepare_tables import prepare_tables
from dlrm.preproc.stages.options import OUTPUT_FORMATS, RunConfig, SplitConfig
from dlrm.preproc.tables.options import TableOptions
from dlrm.scripts.common.spark_flags import SPARK, spark_query
from dlrm.scripts.common.table_flags import (
    PREPARATION,
    TEXT_FLAGS,
    FilesConfig,
    preparation,
    text_format,
)
from dlrm.settings import REQUIRED, setting, settings_of

CRITEO = "criteo"
DEFAULT_TEST_FRACTION = 0.2
_DIVISION = tuple(name for name in settings_of(SplitConfig) if name != "seed")
_LOG_FLAGS = ("cores", "engine", "seed", "bad_lines", "max_bad_lines", "split_bytes", "master")


@dataclass(frozen=True)
class PrepareConfig:
    """The rows, their schema, and the dataset; field names are those of the flags."""

    schema: str = setting(REQUIRED, "schema.yaml, or criteo for logs in Criteo's format")
    output: Path = setting(REQUIRED, "directory to write the dataset to")
    input: tuple[str, ...] = setting((), "files, or directories of files")
    test_input: tuple[str, ...] = setting((), "files of test rows only")
    validation_input: tuple[str, ...] = setting((), "files of validation rows only")
    engine: str = setting(
        "local",
        "local: processes of this machine; spark: Spark. Both write the same bytes",
        choices=ENGINES,
    )
    overwrite: bool = setting(False, "replace an earlier dataset once the new one is complete")
    test_fraction: float | None = setting(
        None,
        f"share of the rows to choose at random as test rows; default: {DEFAULT_TEST_FRACTION} "
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
            *SPARK,
        ],
        ("Dataset", "Files", "Division of rows", "Preparation", "For --schema criteo"),
        without=("held_out",),
    )
    hint = "the same command resumes the run"
    return run_command(line, _prepare, __doc__, arguments, hint=hint)


def _prepare(values: Values) -> int | None:
    own = values.config(PrepareConfig)
    if own.schema == CRITEO:
        return _prepare_logs(values)
    for name in settings_of(CriteoConfig):
        if name in values.given:
            raise ValueError(f"--{name}: is for --schema criteo; got --schema {own.schema}")
    query, tables = _query(values), {}
    if query is None:
        for path in own.input:
            check_outside(own.output, path)
        tables = {"train": find_tables(own.input, values["input_format"], say)}
        for split, given in (("test", own.test_input), ("validation", own.validation_input)):
            if given:
                tables[split] = find_tables(given, values["input_format"], say)
    options = _options(values, len(tables) > 1)
    how = {"replace": own.overwrite, "restart": values["restart"], "query": query, "say": say}
    try:
        prepare_tables(options, tables, own.output, _engine(values, query), **how)
    except FileExistsError as error:
        raise FileExistsError(f"{error}; --overwrite replaces it") from error
    except (TaskError, EngineError) as error:
        raise ValueError(str(error)) from error
    command = ["python", "-m", "dlrm.scripts.main", "--dataset", str(own.output)]
    command += ["--recipe", "auto", "--save_checkpoint_path", "run"]
    print(f"train on it with\n  {shell_line(command)}")
    return None


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
    return TableOptions(
        Schema.load(values["schema"]),
        values.config(SplitConfig, test_fraction=fraction),
        text_format(values),
        **options,
    )


def _engine(values: Values, query: SparkQuery | None):
    spark, cores = values.config(SparkConfig), values.config(RunConfig).num_cores
    check_processes("--cores", cores)  # before anything is written
    output: Path = values["output"]
    return lambda: open_engine(
        values["engine"],
        cores,
        output.resolve().parent / "spark.log",
        spark.master,
        spark.memory_gib,
        spark.settings(query is not None),
        shared_folders(output),
    )


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
    names = ("output_ordering", "restart", "report", "memory_gib")
    arguments += flags_of({name: values[name] for name in names})
    arguments += [f"--write_mode={'overwrite' if values['overwrite'] else 'errorifexists'}"]
    return prepare_logs.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
