"""Rows of any kind, and what a model takes: numbers and ids."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrm.serving.rows.raw import (
        inputs_of_text as inputs_of_text,
        text_of_lines as text_of_lines,
    )


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, since configurations are in this package."""
    if name in ("inputs_of_text", "text_of_lines"):
        return getattr(importlib.import_module("dlrm.serving.rows.raw"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
