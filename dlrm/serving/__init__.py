"""Serving: scores of raw rows, in this process or in a server that has no torch."""
