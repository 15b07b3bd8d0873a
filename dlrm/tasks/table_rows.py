"""A name of before, until its callers give `Checkpoint.load` the sizes of tables."""

from collections.abc import Sequence
from typing import Any


def changed_rows(saved: Any, table_sizes: Sequence[int]) -> Any:
    """Stands for the `table_sizes` of `Checkpoint.load`; see `load_checkpoint`."""
    raise NotImplementedError
