"""The command `python -m dlrm.scripts.checkpoint`."""
