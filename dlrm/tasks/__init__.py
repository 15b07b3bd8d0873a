"""Tasks: each joins a network, a data set and a metric for the trainer."""
