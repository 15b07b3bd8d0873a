"""Days of rows that extend the dictionaries of earlier days."""
