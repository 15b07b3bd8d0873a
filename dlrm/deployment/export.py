"""Writes a trained model into a Triton model repository.

    dlrm export --checkpoint DIR --save-dir REPO

The architecture is read from the checkpoint. Before anything is written, the exported model scores
real rows, and must agree with the checkpoint; `report.json` beside it has the differences. A model
whose dataset is gone, as that of `dlrm.fit` on a table in memory, is compared on generated rows.
"""

import sys

from dlrm.command_line import later
from dlrm.deployment.config import ExportConfig
from dlrm.flags import ConfigFlags, run_command

run = later("dlrm.deployment.exporter")
LINE = ConfigFlags([("Flags", ExportConfig)])


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    return run_command(
        LINE,
        lambda values: run(values.config(ExportConfig)),
        __doc__,
        arguments,
        usage=2,
        errors=(ValueError, OSError, ImportError),
    )


def parse(arguments: list[str]) -> ExportConfig:
    """Reads a command line."""
    return LINE.parse(arguments).config(ExportConfig)


if __name__ == "__main__":
    sys.exit(main())
