#!/usr/bin/env python3
"""Runs `dlrm.scripts.split_dataset`, also where the package is not installed."""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if __name__ == "__main__":
    runpy.run_module("dlrm.scripts.split_dataset", run_name="__main__")
