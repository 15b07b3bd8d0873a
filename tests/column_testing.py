"""Columns of text and dictionaries of their numbers, in the plainest way."""

from collections.abc import Iterable

import numpy as np

from dlrm.data.sources.columns import TextColumn
from dlrm.data.transform.dictionaries import Counts


def text_column(fields: Iterable[str | None]) -> TextColumn:
    """Returns a column of strings, of which None and "" are missing."""
    return TextColumn.from_bytes([(text or "").encode() for text in fields])


def fit_dictionary(counts: Counts) -> np.ndarray:
    """Returns the numbers that get the ids 1, 2, ...: the most frequent first, ties by the number.

    The array is uint32 where every number fits, else uint64.
    """
    keys = counts.keys[np.lexsort((counts.keys, -counts.counts))]
    fits = len(keys) == 0 or keys.max() <= np.iinfo(np.uint32).max
    return keys.astype(np.uint32 if fits else np.uint64)
