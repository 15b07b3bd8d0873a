"""The former place of `click_metrics`, for one version."""

from dlrm.metrics.clicks import click_metrics as click_metrics, fraction_metrics as fraction_metrics
