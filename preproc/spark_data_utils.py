#!/usr/bin/env python3
"""Runs `dlrm.preproc.logs.prepare_logs`, also where the package is not installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dlrm.preproc.logs.prepare_logs import main

if __name__ == "__main__":
    sys.exit(main())
