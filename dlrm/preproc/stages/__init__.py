"""Counts, fits, transforms and describes rows of any source: what logs and tables share."""
