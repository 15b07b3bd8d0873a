"""`dlrm.scripts.main` with the defaults of a run on several GPUs.

    python -m torch.distributed.launch --use_env --nproc_per_node 8 -m dlrm.scripts.dist_main ...
    torchrun --nproc_per_node 8 -m dlrm.scripts.dist_main ...

Batch sizes are those of all processes together.
"""

import sys

from dlrm.scripts import main

DEFAULTS = {  # NVIDIA's, of June 2020; --defaults 2021 has later ones
    "batch_size": 65536,
    "test_batch_size": 131072,
    "lr": 24.0,
    "warmup_steps": 8000,
    "decay_steps": 24000,
    "decay_start_step": 48000,
    "embedding_type": "joint_sparse",
}


def start() -> None:
    main.main(sys.argv[1:], DEFAULTS, __doc__)


if __name__ == "__main__":
    start()
