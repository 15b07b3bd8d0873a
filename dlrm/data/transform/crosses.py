"""Columns of crosses: keys of combinations, computed from the keys of several columns."""

from collections.abc import Sequence

import numpy as np

from dlrm.data.sources.columns import Coded, Parsed, TextColumn, hash_texts
from dlrm.data.transform.lists import Column, single
from dlrm.data.transform.schema import Schema


def cross_columns(schema: Schema, columns: Sequence[Column]) -> list[Parsed | Coded]:
    """Returns the columns of a schema's crosses.

    Args:
        schema: the schema with the crosses.
        columns: columns of the categorical fields.
    """
    by_name = dict(zip((field.column for field in schema.categorical), columns, strict=True))
    return [combined([by_name[name] for name in cross.fields]) for cross in schema.crosses]


def combined(columns: Sequence[Column]) -> Parsed:
    """Returns a key for each row: the hash of the row's keys, 8 bytes each, like that of a text.

    It is missing if the row has no value in one of the columns.
    """
    parsed = [single(column).by_row() for column in columns]
    rows, width = len(parsed[0].values), len(parsed)
    keys = np.zeros(rows * width + 1, "<u8")  # with the 8 bytes that a TextColumn ends with
    keys[:-1].reshape(rows, width)[:] = np.stack([values for values, _ in parsed], axis=1)
    starts = np.arange(rows, dtype=np.int64) * (8 * width)
    hashes = hash_texts(TextColumn(keys.view(np.uint8), starts, starts + 8 * width))
    missing = np.logical_or.reduce([missing for _, missing in parsed])
    return Parsed(np.where(missing, np.uint64(0), hashes), missing)
