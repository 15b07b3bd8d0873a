"""The pipeline from click logs to a dataset."""
