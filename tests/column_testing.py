"""Makes text columns and dictionaries of numbers in the simplest way."""

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from dlrm.data.sources.columns import TextColumn
from dlrm.data.transform.arrays import array_of
from dlrm.data.transform.dictionaries import Counts
from dlrm.data.transform.transform import Transform, Transformed
from dlrm.serving.rows.tables import scoring_reader


def transform_texts(transform: Transform, columns: Iterable[TextColumn]) -> Transformed:
    """Transforms rows, given as the text of each of a transform's columns."""
    arrays = [array_of(column).view(pa.large_string()) for column in columns]
    batch = pa.RecordBatch.from_arrays(arrays, transform.names)
    rows, bad = scoring_reader(transform, labeled=False).read(batch)
    if bad:
        raise bad[0]
    return transform.apply(rows.numerical, rows.categorical)


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
