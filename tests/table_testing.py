"""Makes fitted table transforms by hand."""

import numpy as np

from dlrm.data.schema.numbers import Fitted
from dlrm.data.schema.schema import CategoricalField, Label, NumericalField, Schema
from dlrm.data.sources.columns import TextColumn, hash_texts
from dlrm.data.transform.dictionaries import Dictionary
from dlrm.data.transform.transform import Transform


def dictionary_of(texts):
    """Returns a dictionary of texts in the order of their ids."""
    encoded = [text.encode() for text in texts]
    column = TextColumn.from_bytes(encoded)
    data = np.frombuffer(b"".join(encoded), np.uint8)
    return Dictionary(hash_texts(column), data, np.asarray(column.ends, np.int64), "string")


def table_transform(
    scales,
    dictionaries,
    numeric_transform="standardize",
    missing_values=(),
    label="y",
    positive=None,
    negatives=None,
):
    """Returns a transform from numerical column -> scale and categorical column -> values."""
    schema = Schema(
        Label(label, positive, any_negative=positive is not None),
        tuple(NumericalField(name, numeric_transform) for name in scales),
        tuple(CategoricalField(name) for name in dictionaries),
        tuple(missing_values),
    )
    fitted = [Fitted(*scale) for scale in scales.values()]
    texts = [dictionary_of(values) for values in dictionaries.values()]
    return Transform(schema, fitted, texts, ["string"] * len(texts), negatives)
