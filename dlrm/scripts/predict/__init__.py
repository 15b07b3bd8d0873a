"""Scores rows with a trained model: dlrm predict --checkpoint DIR ..."""
