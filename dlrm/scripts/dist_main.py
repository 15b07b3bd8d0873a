"""`dlrm.scripts.main` with the defaults of a run on several GPUs.

    python -m torch.distributed.launch --use_env --nproc_per_node 8 -m dlrm.scripts.dist_main ...
    torchrun --nproc_per_node 8 -m dlrm.scripts.dist_main ...

Batch sizes are those of all processes together.
"""

import sys

from dlrm.scripts import main
from dlrm.scripts.common.dlrm_flags import DIST_MAIN


def start() -> None:
    main.main(sys.argv[1:], DIST_MAIN, __doc__)


if __name__ == "__main__":
    start()
