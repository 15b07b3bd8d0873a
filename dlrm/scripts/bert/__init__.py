"""The command `python -m dlrm.scripts.bert`."""
