"""The report on the rows of a dataset, as numbers and as a page."""
