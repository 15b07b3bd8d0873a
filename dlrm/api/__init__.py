"""The Python API: from a table in memory to a trained model."""
