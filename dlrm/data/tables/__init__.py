"""Reads tables of named columns, from files and from memory, by a schema."""
