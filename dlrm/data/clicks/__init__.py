"""Batches of clicks: readers, writer and description of a dataset on disk."""
