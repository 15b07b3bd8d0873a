"""The benchmark rows of each source document, and the commands that they print."""
