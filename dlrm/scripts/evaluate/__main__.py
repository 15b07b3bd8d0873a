"""python -m dlrm.scripts.evaluate"""

from absl import flags

from dlrm.scripts import predict
from dlrm.scripts.common.command import run_command
from dlrm.scripts.evaluate import command

__doc__ = command.__doc__  # the first line of --help

if __name__ == "__main__":
    command.define_flags()
    for module in (command, predict):
        flags.adopt_module_key_flags(module)
    run_command(command.main)
