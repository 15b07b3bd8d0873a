"""Rows of any kind, and what a model takes: numbers and ids."""
