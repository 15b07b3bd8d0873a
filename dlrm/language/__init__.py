"""BERT: its data, task, flags and command."""
