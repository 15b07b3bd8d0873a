"""Embedding tables: in one weight, divided among processes, or in a store."""
