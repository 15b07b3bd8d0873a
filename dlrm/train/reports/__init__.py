"""What a run leaves for people: curves, the card of its model, and entries in trackers."""
