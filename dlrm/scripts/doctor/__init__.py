"""The command `dlrm doctor`."""
