"""Checks a dataset on disk: `dlrm verify DIR`.

It checks sizes and CRC-32 of the manifest, the specification, every id against the cardinality of
its table, every label, number and weight, and the lengths of lists. It reports all errors; the exit
status is 1 if there are any. Files that the manifest does not list are also reported, and are
errors if a reader would take them for a part of the dataset.

For datasets of images and of pre-training rows, it checks the files against the manifest, and the
labels of images.
"""

import sys

from dlrm.command_line import later
from dlrm.flags import ConfigFlags, run_command
from dlrm.scripts.verify_dataset.flags import VerifyConfig


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    return run_command(
        ConfigFlags([("Flags", VerifyConfig)]),
        later("dlrm.scripts.verify_dataset.command"),
        __doc__,
        arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
