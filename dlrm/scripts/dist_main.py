"""`dlrm.scripts.main` with the defaults of a run on several GPUs.

    python -m torch.distributed.launch --use_env --nproc_per_node 8 -m dlrm.scripts.dist_main ...
    torchrun --nproc_per_node 8 -m dlrm.scripts.dist_main ...

Batch sizes are those of all processes together.
"""

import sys
from collections.abc import Mapping
from typing import Any

from dlrm.scripts import main as command
from dlrm.scripts.common.dlrm_flags import DIST_MAIN


def main(arguments: list[str], defaults: Mapping[str, Any] | None = None) -> None:
    """Runs a command line and ends the process."""
    command.main(arguments, {**DIST_MAIN, **(defaults or {})}, __doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
