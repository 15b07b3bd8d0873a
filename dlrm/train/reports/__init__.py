"""Reports of a run for people: curves, the model card, and entries in trackers."""
