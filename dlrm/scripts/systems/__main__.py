import sys

from dlrm.scripts.systems.command import main

if __name__ == "__main__":
    sys.exit(main())
