"""Evaluates models on rows: dlrm evaluate --checkpoint RUN --dataset DIR"""
