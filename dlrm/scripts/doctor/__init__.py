"""The command `python -m dlrm.scripts.doctor`."""
