"""python -m dlrm.scripts.checkpoint"""

import sys

from dlrm.scripts.checkpoint.command import main

if __name__ == "__main__":
    sys.exit(main())
