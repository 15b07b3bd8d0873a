"""Lists, runs and compares the rows of the catalog."""
