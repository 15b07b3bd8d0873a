"""Scores rows with a trained model: dlrm predict --checkpoint DIR --input FILE

The input is a log in the format of the training data (`day_0`: a label, integers and hashes,
separated by tabs; "-" reads standard input), a table (a file or directory of a kind that
`--input_format` lists), a table or query of Spark (`--spark_table`, `--spark_sql`), or a dataset's
directory. It is read and scored some megabytes at a time, and the scores, float32, are written in
the order of the rows, as a .npy file for `numpy.load`.
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import sys

from dlrm.command_line import later
from dlrm.flags import run_command
from dlrm.scripts.common.source_flags import scoring_line
from dlrm.scripts.common.spark_flags import SPARK
from dlrm.scripts.predict.flags import PredictConfig


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    line = scoring_line(("Scores", PredictConfig), *SPARK)
    return run_command(line, later("dlrm.scripts.predict.command"), __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
