"""Evaluates models on rows: python -m dlrm.scripts.evaluate --checkpoint RUN --dataset DIR"""
