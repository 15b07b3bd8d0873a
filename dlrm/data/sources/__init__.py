"""Raw rows of Criteo logs and CSV as columns; needs no torch."""
