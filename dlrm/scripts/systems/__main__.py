import sys

from dlrm.published.command import main

if __name__ == "__main__":
    sys.exit(main())
