"""Preprocessing, from raw logs, images and CSV to datasets; needs no torch.

`dlrm.preproc.run` makes a dataset in a session of Spark.
"""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """Imports `run` when it is first used, from the floor of Python's functions."""
    if name == "run":
        return importlib.import_module("dlrm.api.spark_session").run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
