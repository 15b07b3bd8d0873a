"""Scores rows with a trained model: python -m dlrm.scripts.predict --checkpoint DIR ..."""
