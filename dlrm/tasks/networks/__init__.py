"""Runs of networks without tables: image networks and BERT."""
