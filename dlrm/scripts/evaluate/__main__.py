"""python -m dlrm.scripts.evaluate"""

from absl import flags

from dlrm.scripts.common import source_flags
from dlrm.scripts.common.command import run_command
from dlrm.scripts.evaluate import command

__doc__ = command.__doc__  # the first line of --help

if __name__ == "__main__":
    command.define_flags()
    for module in (command, source_flags):
        flags.adopt_module_key_flags(module)
    run_command(command.main)
