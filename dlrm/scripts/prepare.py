"""Turns tables or logs into a dataset: python -m dlrm.scripts.prepare --schema S --input FILES

    python -m dlrm.scripts.schema --input sales.parquet --label bought --output schema.yaml
    python -m dlrm.scripts.prepare --schema schema.yaml --input sales.parquet --output dataset
    python -m dlrm.scripts.main --dataset dataset --recipe auto --save_checkpoint_path run

Input is files of tables, or directories of them, of the kinds that `--input_format` lists, or with
`--engine spark` a table or query of Spark (`--spark_table`, `--spark_sql`). The schema defines the
meaning of the columns; `--schema criteo` is built in, and reads directories of `day_0`, `day_1`,
... as `preproc/prepare_dataset.sh` does. The same command resumes a run that was stopped.
"""

from pathlib import Path

from absl import flags

from dlrm.command_line import say, shell_line
from dlrm.data.tables.files import find_tables
from dlrm.data.transform.numeric_transforms import CRITEO_TRANSFORMS, described
from dlrm.data.transform.schema import Schema
from dlrm.files import check_outside
from dlrm.limits import check_processes
from dlrm.preproc import prepare_logs
from dlrm.preproc.execution.choice import ENGINES, open_engine
from dlrm.preproc.execution.engines import EngineError, TaskError
from dlrm.preproc.execution.spark_query import SparkQuery
from dlrm.preproc.execution.work_folder import shared_folders
from dlrm.preproc.prepare_tables import prepare_tables
from dlrm.preproc.stages.dataset_files import OUTPUT_FORMATS
from dlrm.preproc.stages.division import SplitConfig
from dlrm.preproc.stages.options import ORDERINGS
from dlrm.preproc.tables.options import TableOptions
from dlrm.scripts.common import spark_flags, table_flags
from dlrm.scripts.common.command import no_arguments, run_command
from dlrm.scripts.common.spark_flags import define_spark_flags, spark_query, spark_settings
from dlrm.scripts.common.table_flags import (
    TEXT_FLAGS,
    define_preparation_flags,
    define_text_flags,
    table_options,
    text_format,
)

FLAGS = flags.FLAGS
CRITEO = "criteo"
DEFAULT_TEST_FRACTION = 0.2
_TABLE_FLAGS = (  # not for logs
    *("spark_table", "spark_sql"),
    *("test_input", "validation_input", "test_fraction", "validation_fraction", "split_key"),
    *("test_from", "validation_from", "split_column", "keep_negatives"),
    *("input_format", "columns", "header", *TEXT_FLAGS),
)
_LOGS_ONLY = (  # not for tables, whose schema has the like
    *("num_days", "num_numerical", "num_categorical", "frequency_limit", "dictionary_days"),
    *("numeric_transform", "output_format"),
)
_LOG_FLAGS = ("cores", "engine", "seed", "bad_lines", "max_bad_lines", "split_bytes", "master")


def define_flags() -> None:
    flags.DEFINE_string(
        "schema", None, "schema.yaml, or criteo for logs in Criteo's format", required=True
    )
    flags.DEFINE_list("input", [], "files, or directories of files")
    flags.DEFINE_string("output", None, "directory to write the dataset to", required=True)
    flags.DEFINE_list("test_input", [], "files of test rows only")
    flags.DEFINE_list("validation_input", [], "files of validation rows only")
    flags.DEFINE_float(
        "test_fraction",
        None,
        f"share of the rows to choose at random as test rows; default: {DEFAULT_TEST_FRACTION} "
        "if no other flag splits the rows",
    )
    flags.DEFINE_float(
        "validation_fraction", 0.0, "share of the rows to choose at random for validation"
    )
    flags.DEFINE_string(
        "split_key", None, "column whose equal values all go to one split, such as the user"
    )
    flags.DEFINE_string("test_from", None, "time, in ISO 8601, from which on rows are test rows")
    flags.DEFINE_string(
        "validation_from", None, "time, in ISO 8601, from which on rows are validation rows"
    )
    flags.DEFINE_string("split_column", None, "column with the values train, test or validation")
    flags.DEFINE_float("keep_negatives", 1.0, "share of the training rows with label 0 to keep")
    flags.DEFINE_integer("seed", 0, "seed of random choices and of the order of training rows")
    flags.DEFINE_enum("output_ordering", "total_random", ORDERINGS, "order of the training rows")
    define_text_flags()
    define_preparation_flags()
    flags.DEFINE_enum(
        "engine",
        "local",
        ENGINES,
        "local: processes of this machine; spark: Spark. Both write the same bytes",
    )
    flags.DEFINE_integer(
        "split_bytes", None, "bytes of input that one task reads; does not change the result"
    )
    for name, meaning in (
        ("num_days", "number of day files, or of days into which train.txt is cut"),
        ("num_numerical", "number of integer columns; default: 13"),
        ("num_categorical", "number of hexadecimal columns; default: 26"),
    ):
        flags.DEFINE_integer(name, None, f"--schema criteo: {meaning}")
    flags.DEFINE_string(
        "frequency_limit",
        None,
        "--schema criteo: number of rows that a value must occur in to get an id: N, or COLUMN:N, "
        "comma-separated; default: 15",
    )
    flags.DEFINE_string(
        "dictionary_days", None, "--schema criteo: days to fit on, as A-B; default: all"
    )
    flags.DEFINE_enum(
        "numeric_transform",
        None,
        CRITEO_TRANSFORMS,
        f"--schema criteo: {described(CRITEO_TRANSFORMS)}; default: readme",
    )
    flags.DEFINE_enum(
        "output_format",
        None,
        OUTPUT_FORMATS,
        "--schema criteo: split_binary (default), one file per feature; binary, NVIDIA's rows of "
        "4-byte words",
    )
    flags.adopt_module_key_flags(table_flags)  # for --help
    define_spark_flags()
    flags.adopt_module_key_flags(spark_flags)
    flags.DEFINE_boolean(
        "overwrite", False, "replace an earlier dataset once the new one is complete"
    )


def main(argv: list[str]) -> int | None:
    no_arguments(argv)
    if FLAGS.schema == CRITEO:
        return _prepare_logs()
    for name in _LOGS_ONLY:
        if FLAGS[name].present:
            raise ValueError(f"--{name}: is for --schema criteo; got --schema {FLAGS.schema}")
    query, tables, output = _query(), {}, Path(FLAGS.output)
    if query is None:
        for path in FLAGS.input:
            check_outside(output, path)
        tables = {"train": find_tables(FLAGS.input, FLAGS.input_format, say)}
        for split in ("test", "validation"):
            if given := FLAGS[f"{split}_input"].value:
                tables[split] = find_tables(given, FLAGS.input_format, say)
    options = _options(len(tables) > 1)
    how = {"replace": FLAGS.overwrite, "restart": FLAGS.restart, "query": query, "say": say}
    try:
        prepare_tables(options, tables, output, _engine(output, query), **how)
    except FileExistsError as error:
        raise FileExistsError(f"{error}; --overwrite replaces it") from error
    except (TaskError, EngineError) as error:
        raise ValueError(str(error)) from error
    command = ["python", "-m", "dlrm.scripts.main", "--dataset", str(output), "--recipe", "auto"]
    print(f"train on it with\n  {shell_line([*command, '--save_checkpoint_path', 'run'])}")
    return None


def _query() -> SparkQuery | None:
    """Returns Spark's query, or None if files are read."""
    query = spark_query("input", "test_input", "validation_input")
    if query is not None and FLAGS.engine != "spark":
        raise ValueError(f"{query.flag}: expected --engine spark, got {FLAGS.engine}")
    return query


def _options(by_files: bool) -> TableOptions:
    fraction = FLAGS.test_fraction
    if fraction is None:
        divided = by_files or FLAGS.test_from or FLAGS.split_column
        fraction = 0.0 if divided else DEFAULT_TEST_FRACTION
    division = SplitConfig(
        test_fraction=fraction,
        validation_fraction=FLAGS.validation_fraction,
        split_key=FLAGS.split_key,
        test_from=FLAGS.test_from,
        validation_from=FLAGS.validation_from,
        split_column=FLAGS.split_column,
        keep_negatives=FLAGS.keep_negatives,
        seed=FLAGS.seed,
    )
    return TableOptions(
        schema=Schema.load(FLAGS.schema),
        division=division,
        text=text_format(),
        output_ordering=FLAGS.output_ordering,
        split_bytes=FLAGS.split_bytes,
        **table_options(),
    )


def _engine(output: Path, query: SparkQuery | None):
    check_processes("--cores", FLAGS.cores)  # before anything is written
    settings = spark_settings(query)
    log = output.resolve().parent / "spark.log"
    return lambda: open_engine(
        FLAGS.engine,
        FLAGS.cores,
        log,
        FLAGS.master,
        FLAGS.memory_gib,
        settings,
        shared_folders(output),
    )


def _prepare_logs() -> int:
    """Prepares logs in Criteo's format, as `preproc/prepare_dataset.sh` does."""
    for name in _TABLE_FLAGS:
        if FLAGS[name].present:
            raise ValueError(f"--{name}: is for schemas of tables; --schema criteo has none")
    if len(FLAGS.input) != 1:
        raise ValueError(f"--input: expected one folder of days, got {len(FLAGS.input)}")
    arguments = [f"--input_folder={FLAGS.input[0]}", f"--output_folder={FLAGS.output}"]
    given = {name: FLAGS[name].value for name in (*_LOG_FLAGS, *_LOGS_ONLY)}
    arguments += [f"--{name}={value}" for name, value in given.items() if value is not None]
    arguments += [f"--conf={item}" for item in FLAGS.conf]
    arguments += [f"--output_ordering={FLAGS.output_ordering}"]
    arguments += ["--restart"] * FLAGS.restart + ["--no-report"] * (not FLAGS.report)
    arguments += [f"--memory_gib={FLAGS.memory_gib}"]
    arguments += [f"--write_mode={'overwrite' if FLAGS.overwrite else 'errorifexists'}"]
    return prepare_logs.main(arguments)


if __name__ == "__main__":
    define_flags()
    run_command(main, hint="the same command resumes the run")
