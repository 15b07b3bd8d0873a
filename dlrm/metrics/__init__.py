"""Metrics of scores, computed in numpy from rows that were scored offline."""
