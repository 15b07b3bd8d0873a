"""Criteo's logs as a built-in schema.

A line is a label, integers and hexadecimal hashes, with tabs between them.
"""

from functools import cache

from dlrm.data.choices import CRITEO_TRANSFORMS
from dlrm.data.layout import field_names
from dlrm.data.schema.schema import CategoricalField, Label, NumericalField, Schema
from dlrm.data.sources.text_format import NONE, TextFormat
from dlrm.limits import check_features

LABEL = "label"


@cache
def log_schema(num_numerical: int, frequency_limits: tuple[int, ...], rule: str) -> Schema:
    """Returns the schema of logs.

    Args:
        num_numerical: number of integers in a line.
        frequency_limits: minimum count of a value with an id, for each hash.
        rule: transform of the integers, one of `CRITEO_TRANSFORMS`.

    Raises:
        ValueError: there is no such rule.
    """
    if rule not in CRITEO_TRANSFORMS:
        expected = ", ".join(CRITEO_TRANSFORMS)
        raise ValueError(f"numeric transform {rule!r}: expected one of {expected}")
    check_features("num_numerical", num_numerical)
    transform = CRITEO_TRANSFORMS[rule]
    numerical, categorical = field_names(num_numerical, len(frequency_limits))
    columns = (LABEL, *numerical, *categorical)
    return Schema(
        Label(LABEL),
        tuple(NumericalField(name, transform, type="decimal") for name in numerical),
        tuple(
            CategoricalField(name, "hexadecimal", frequency_limit=max(limit, 1))
            for name, limit in zip(categorical, frequency_limits, strict=True)
        ),
        format=TextFormat(columns, header=False, delimiter="\t", quote=NONE),
    )


def is_log(schema: Schema) -> bool:
    """Returns whether a schema is that of logs, without further fields or options."""
    limits = tuple(field.frequency_limit for field in schema.categorical)
    transforms = {field.transform for field in schema.numerical}
    rule = next((name for name, own in CRITEO_TRANSFORMS.items() if {own} >= transforms), None)
    if schema.format is None or rule is None:
        return False
    return schema == log_schema(len(schema.numerical), limits, rule)
