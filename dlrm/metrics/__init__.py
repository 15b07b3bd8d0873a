"""Metrics: the table of all, those of tests over ranks, and those of rows scored offline."""
