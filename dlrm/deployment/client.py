"""Sends rows to a Triton server; reports AUC, latency and throughput.

    dlrm client --input DATASET
    dlrm client --input day_23 --batch-size 64
    dlrm client --inference_data DATASET/test --dataset_config DATASET/model_size.json

The input is a dataset, whose numericals and ids are sent, or a log, whose lines are sent unchanged.
Tensors are sent in binary form; a batch larger than the server accepts is sent in several requests.
The third command has the flags of NVIDIA's client, whose protocol is http. `python
triton/client.py` works alike.
"""

import sys

from dlrm.command_line import later
from dlrm.deployment.config import ClientConfig
from dlrm.flags import ConfigFlags, Values, run_command
from dlrm.serving.network.platforms import require

LINE = ConfigFlags([("Flags", ClientConfig)])


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    errors = (ValueError, OSError, ImportError)
    return run_command(LINE, _run, __doc__, arguments, usage=2, errors=errors)


def _run(values: Values) -> None:
    options = values.config(ClientConfig)
    require(f"tritonclient.{options.by}")
    later("dlrm.deployment.sender")(options)


if __name__ == "__main__":
    sys.exit(main())
