"""Deployment: a Triton model repository of a trained model, its server and a client."""

import sys

if sys.argv[:1] == ["-m"]:  # Python imports a command, to run it
    from dlrm.command_line import end_while_imported

    end_while_imported()
