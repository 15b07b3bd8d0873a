"""Reads tables of named columns, as Parquet, CSV or JSON lines, by a schema."""
