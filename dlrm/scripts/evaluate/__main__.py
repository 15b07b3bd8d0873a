"""Evaluates a trained model on new rows, alone or against another model.

    dlrm evaluate --checkpoint RUN --dataset DIR [--against OTHER] [--output DIR]
    dlrm evaluate --checkpoint RUN --input day_7,day_8 --slices "categorical 3"

Every metric has an interval. --output writes the results as one self-contained page,
`evaluation.html`, with `evaluation.json` beside it.
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import sys

from dlrm.command_line import later
from dlrm.flags import run_command
from dlrm.scripts.common.scoring import scoring_line
from dlrm.scripts.evaluate import EvaluateConfig

_DATASET = (
    "Dataset to evaluate on; with --input, dataset whose fitted transform to apply if the "
    "checkpoint has none"
)


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    line = scoring_line(("Evaluation", EvaluateConfig), dataset=_DATASET)
    return run_command(line, later("dlrm.scripts.evaluate.command"), __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
