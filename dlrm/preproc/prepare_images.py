"""dlrm prepare-images"""

import sys

from dlrm.vision.preparation.command import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
