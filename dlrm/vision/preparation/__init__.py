"""The pipeline from images to shards."""
