"""Runs commands by their former paths in this folder, which the next version removes."""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dlrm.command_line import end_while_imported


def run(name: str, module: str) -> None:
    """Runs a module's command, given the `__name__` of the script that does so."""
    end_while_imported(name)
    sys.exit(importlib.import_module(module).main())
