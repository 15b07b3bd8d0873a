"""Benchmark rows that source documents publish, as data, and the command that runs them."""
