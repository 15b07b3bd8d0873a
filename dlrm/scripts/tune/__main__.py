"""python -m dlrm.scripts.tune"""

import sys

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
from dlrm.scripts.tune.command import main

if __name__ == "__main__":
    sys.exit(main())
