"""The command `dlrm cnn`."""
