#!/usr/bin/env python3
"""Runs `dlrm.scripts.simulate_logs`, whose former path this is; the next version removes it."""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dlrm.command_line import end_while_imported

end_while_imported(__name__)

if __name__ == "__main__":
    runpy.run_module("dlrm.scripts.simulate_logs", run_name="__main__")
