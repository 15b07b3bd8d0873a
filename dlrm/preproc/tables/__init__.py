"""Turns tables of named columns into a dataset, by a schema."""
