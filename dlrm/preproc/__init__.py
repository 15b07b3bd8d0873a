"""Preprocessing, from raw logs, images and CSV to datasets; needs no torch."""
