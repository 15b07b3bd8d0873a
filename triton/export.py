#!/usr/bin/env python3
"""Runs `dlrm.deployment.export`, also where the package is not installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if __name__ == "__main__":
    from dlrm.deployment.export import main

    sys.exit(main())
