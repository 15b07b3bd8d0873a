"""Writes a trained model into a Triton model repository.

    dlrm export --checkpoint DIR --save-dir REPO

The architecture is read from the checkpoint. Before anything is written, the exported model scores
real rows, and must agree with the checkpoint; `report.json` beside it has the differences. A model
whose dataset is gone, as that of `dlrm.fit` on a table in memory, is compared on generated rows.
"""

import sys

from dlrm.command_line import later
from dlrm.deployment.config import ExportConfig
from dlrm.flags import ConfigFlags, Values, run_command

run = later("dlrm.deployment.exporter")
LINE = ConfigFlags([("Flags", ExportConfig)])


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    errors = (ValueError, OSError, ImportError)
    return run_command(LINE, _run, __doc__, arguments, usage=2, errors=errors)


def _run(values: Values) -> None:
    run(values.config(ExportConfig))


def parse(arguments: list[str]) -> ExportConfig:
    """Reads a command line."""
    return LINE.parse(arguments).config(ExportConfig)


if __name__ == "__main__":
    sys.exit(main())
