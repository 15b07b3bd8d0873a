"""Preprocessing, from raw logs, images and CSV to datasets; needs no torch.

`dlrm.preproc.run` makes a dataset in a session of Spark.
"""

import importlib
import sys
from typing import Any

if sys.argv[:1] == ["-m"]:  # Python imports a command, to run it
    from dlrm.command_line import end_while_imported

    end_while_imported()


def __getattr__(name: str) -> Any:
    """Imports `run` when it is first used, from the floor of Python's functions."""
    if name == "run":
        return importlib.import_module("dlrm.api.spark_session").run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
