"""Fitted transforms, from raw columns to features; needs no torch."""

from dlrm.data.transform.transform import Transform

__all__ = ["Transform"]
