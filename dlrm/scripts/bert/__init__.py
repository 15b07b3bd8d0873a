"""The command `dlrm bert`."""
