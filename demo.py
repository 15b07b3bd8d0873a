"""Runs `dlrm.scripts.demo`, whose former path this is; the next version removes it."""

import sys

from dlrm.scripts.demo import main

sys.exit(main())
