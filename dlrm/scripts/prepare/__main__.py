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

import sys

from dlrm.data.sources.text_format import TextFormat
from dlrm.flags import ConfigFlags, Values, run_command
from dlrm.preproc.options import IncrementConfig, SplitConfig
from dlrm.preproc.spark.session import reads_by_uri
from dlrm.scripts.common.spark_flags import SPARK
from dlrm.scripts.common.table_flags import PREPARATION, FilesConfig
from dlrm.scripts.prepare.flags import INPUTS, CriteoConfig, PrepareConfig


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
    return run_command(line, _run, __doc__, arguments, at_store=_at_store, hint=hint)


def _at_store(values: Values) -> tuple[str, ...]:
    return INPUTS if reads_by_uri(values, values["output"]) else ()


def _run(values: Values) -> int | None:
    from dlrm.variables import return_memory

    return_memory()  # before Arrow is imported, so that copies of the process have its choice
    from dlrm.scripts.prepare.command import run

    return run(values)


if __name__ == "__main__":
    sys.exit(main())
