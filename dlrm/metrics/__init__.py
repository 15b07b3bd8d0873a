"""What scores are worth, computed in numpy from rows that were scored offline."""
