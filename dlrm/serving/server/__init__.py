"""Requests to scores in a server without torch; `triton/export.py` copies it into repositories."""
