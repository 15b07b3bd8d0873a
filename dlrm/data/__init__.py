"""Datasets: their layout on disk, the transform from raw logs, and the readers."""
