"""Makes fitted table transforms by hand."""

import json

from dlrm.data.transform.dictionaries import Dictionary
from dlrm.data.transform.numbers import Fitted
from dlrm.data.transform.schema import CategoricalField, Label, NumericalField, Schema
from dlrm.data.transform.transform import Transform


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
    texts = [Dictionary.from_texts(values) for values in dictionaries.values()]
    return Transform(schema, fitted, texts, negatives)


def save_as_before(transform, directory, **changes):
    """Writes a transform in the CSV format of earlier versions."""
    schema = transform.schema
    facts = {
        "version": 1,
        "numeric_transform": schema.numerical[0].transform,
        "scales": {
            field.column: [fitted.mean, fitted.deviation]
            for field, fitted in zip(schema.numerical, transform.numerical, strict=True)
        },
        "dictionaries": {
            field.column: transform.dictionaries[place].values()
            for field, place in zip(schema.categorical, transform.dictionary_of, strict=True)
        },
        "missing_values": list(schema.missing_values),
        "label": schema.label.column,
        "positive": schema.label.positive,
        "negatives": transform.negatives,
    } | changes
    directory.mkdir(exist_ok=True)
    for path in directory.iterdir():
        path.unlink()
    facts = {name: value for name, value in facts.items() if value is not ...}
    (directory / "csv.json").write_text(json.dumps(facts))
