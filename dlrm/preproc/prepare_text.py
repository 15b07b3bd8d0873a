"""dlrm prepare-text"""

import sys

from dlrm.language.pretraining.command import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
