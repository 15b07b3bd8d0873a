"""The compiled host code, `csrc/host`: the log parser and the lookup of ids."""

import importlib
from typing import Any

host: Any
try:
    host = importlib.import_module("dlrm._host")
except ImportError:  # the package was installed without a compiler
    host = None
