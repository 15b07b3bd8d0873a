"""Stages that logs and tables share: count, fit, transform and describe rows of any source."""
