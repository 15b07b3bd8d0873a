"""Turns raw click logs into a dataset, or does one step of it, with Spark.

    dlrm prepare-logs --input_folder LOGS --output_folder DIR

    --mode verify           check that all day files exist
    --mode prepare          the whole dataset: dictionary, train, test, validation (the default)
    --mode generate_models  fit a transform on days: writes --model_folder
    --mode transform        apply a fitted transform to days: writes --output_folder

Input is day_0, day_1, ..., or Kaggle's train.txt, which is cut into --num_days (7) days of equally
many lines, with test.txt beside it, if it is there; each plain, .gz or .zst. The same command
resumes a run that was stopped. `preproc/spark_data_utils.py` works alike.
"""

import sys

from dlrm.data.sources.text_format import LogFormat
from dlrm.flags import ConfigFlags, Values, run_command
from dlrm.preproc.errors import EngineError, TaskError
from dlrm.preproc.logs.options import LogOptions, LogsConfig
from dlrm.preproc.options import IncrementConfig, RunConfig
from dlrm.preproc.spark.session import SparkConfig, reads_by_uri

_HELPS = {
    "output_ordering": "order of training rows (of all rows for --mode transform)",
    "split_bytes": "bytes of text that one task reads; does not change the result",
}


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    line = ConfigFlags(
        [
            ("Logs", LogsConfig),
            ("Columns", LogFormat),
            ("Preparation", LogOptions),
            ("Preparation", RunConfig),
            ("Extension", IncrementConfig),
            ("Spark", SparkConfig),
        ],
        helps=_HELPS,
    )
    errors = (ValueError, OSError, TaskError, EngineError)
    hint = "the same command resumes the run"
    return run_command(
        line, _run, __doc__, arguments, usage=2, at_store=_at_store, errors=errors, hint=hint
    )


def _at_store(values: Values) -> tuple[str, ...]:
    return ("input_folder",) * reads_by_uri(values, values["output_folder"])


def _run(values: Values) -> None:
    from dlrm.preproc.logs.command import run

    run(values)


if __name__ == "__main__":
    sys.exit(main())
