"""Tasks: each combines a network, a data set and a metric for the trainer."""
