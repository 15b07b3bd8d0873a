"""Rows of any kind, and what a model takes: numbers and ids."""

from dlrm.serving.rows.raw import RowTransform as RowTransform
from dlrm.serving.rows.raw import inputs_of_text as inputs_of_text
from dlrm.serving.rows.raw import text_of_lines as text_of_lines
