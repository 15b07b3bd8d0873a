"""The command `python -m dlrm.scripts.cnn`."""
