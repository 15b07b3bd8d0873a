"""Tables larger than memory: rows in a file, of which a part is in memory."""
