"""Requests to scores in a server without torch; the exporter copies it into repositories."""
