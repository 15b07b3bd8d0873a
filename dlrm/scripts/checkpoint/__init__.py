"""The command `dlrm checkpoint`."""
