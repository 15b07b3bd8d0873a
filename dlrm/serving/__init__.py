"""Serving: scores of raw rows, in this process or in a server without torch."""
