"""Fitted transforms, from raw columns to features; needs no torch."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrm.data.transform.transform import Transform as Transform


__all__ = ["Transform"]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used."""
    if name in __all__:
        return getattr(importlib.import_module("dlrm.data.transform.transform"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
