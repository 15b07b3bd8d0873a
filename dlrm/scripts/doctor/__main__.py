"""dlrm doctor"""

import sys

from dlrm.scripts.doctor.command import main

if __name__ == "__main__":
    sys.exit(main())
