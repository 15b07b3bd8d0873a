"""Image and language networks."""
