"""Rows of masked-language-model pre-training, from raw text to shards and batches."""
