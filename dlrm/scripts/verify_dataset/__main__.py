"""Checks a dataset on disk: `dlrm verify DIR`.

It checks sizes and CRC-32 of the manifest, the specification, every id against the cardinality of
its table, every label, number and weight, and the lengths of lists. It reports all errors; the exit
status is 1 if there are any. Files that the manifest does not list are also reported, and are
errors if a reader would take them for a part of the dataset.

For datasets of images and of pre-training rows, it checks the files against the manifest, and the
labels of images.
"""

import sys

from dlrm.flags import ConfigFlags, Values, run_command
from dlrm.scripts.verify_dataset.flags import VerifyConfig


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    return run_command(ConfigFlags([("Flags", VerifyConfig)]), _run, __doc__, arguments)


def _run(values: Values) -> None:
    from dlrm.scripts.verify_dataset.command import run

    run(values)


if __name__ == "__main__":
    sys.exit(main())
