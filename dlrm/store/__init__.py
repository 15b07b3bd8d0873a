"""Tables larger than memory: rows in a file, some of which are in memory."""
