"""Makes text columns and dictionaries of numbers in the simplest way."""

from collections.abc import Iterable

import numpy as np

from dlrm.data.sources.columns import TextColumn
from dlrm.data.transform.dictionaries import Counts


def text_column(fields: Iterable[str | None]) -> TextColumn:
    """Returns a column of strings, where None and "" are missing."""
    return TextColumn.from_bytes([(text or "").encode() for text in fields])


def fit_dictionary(counts: Counts) -> np.ndarray:
    """Returns the numbers with the ids 1, 2, ...: by falling frequency, ties by number.

    The array is uint32 where every number fits, else uint64.
    """
    keys = counts.keys[np.lexsort((counts.keys, -counts.counts))]
    fits = len(keys) == 0 or keys.max() <= np.iinfo(np.uint32).max
    return keys.astype(np.uint32 if fits else np.uint64)
