"""Runs `dlrm.scripts.commands`: python -m dlrm train --dataset DIR ..."""

import sys

from dlrm.scripts.commands import main

if __name__ == "__main__":
    sys.exit(main())
