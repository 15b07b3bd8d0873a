"""The rows that `dlrm.fit` trains on: a dataset, or a table in memory with a schema or a draft."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm.api.dataset import Dataset
from dlrm.data.tables.draft import Draft, draft
from dlrm.data.tables.frames import open_frame
from dlrm.remote.uri import is_uri
from dlrm.serving.wording import warn


@dataclass(frozen=True)
class ColumnRoles:
    """The columns of a table with roles, as the caller of `dlrm.fit` names them.

    Attributes:
        label: the label; None if a schema says all.
        positive: the values of the label that count as 1; None decides by the values.
        weight: weights of rows.
        groups: columns that metrics are grouped by.
        time: the time of a row.

    Raises:
        ValueError: an argument is not the name of a column; the message names it.
    """

    label: str | None
    positive: Any
    weight: str | None
    groups: str | Sequence[str] | None
    time: str | None

    def __post_init__(self) -> None:
        for name in ("label", "weight", "time"):
            if not isinstance(value := getattr(self, name), str | None):
                raise ValueError(f"{name}: expected the name of one column, got {value!r}")
            if name != "label" and value is not None and value == self.label:
                raise ValueError(f"{name}: expected another column than the label {self.label!r}")

    def given(self) -> dict[str, Any]:
        """Returns the arguments that the caller gave."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def draft(self, data: Any) -> tuple[Any, Draft]:
        """Returns a table that can be read again, and its draft; warns of what to check."""
        table = open_frame(data, None).read_all()  # a stream can be read only once
        groups = [self.groups] if isinstance(self.groups, str) else [*(self.groups or ())]
        found = draft(
            table.to_batches(),
            self.label or "",
            positive=None if self.positive is None else _listed(self.positive),
            weight=self.weight,
            groups=groups,
            time=self.time,
        )
        if note := found.note():
            warn(
                f"the schema drafted from the table {note}; print(model.draft.text()) shows it, "
                "and schema= takes another"
            )
        return table, found


def _listed(positive: Any) -> str:
    """Returns values of a label as text, with commas between several."""
    if isinstance(positive, list | tuple | set):
        return ",".join(map(_listed, positive))
    return str(positive).lower() if isinstance(positive, bool) else str(positive)


def opened(
    data: Any,
    schema: Any,
    roles: ColumnRoles,
    splits: Mapping[str, Any],
    options: Mapping[str, Any],
    verbose: bool = False,
) -> tuple[Dataset, Draft | None]:
    """Returns the dataset to train on, and the draft of its schema if there is none.

    Args:
        data, schema, verbose: see `dlrm.fit`.
        roles: columns of a table without a schema.
        splits: tables of "test" and "validation" rows, or None.
        options: of `Dataset.from_arrow`.
    """
    if isinstance(data, Dataset | str | os.PathLike):
        dataset = data if isinstance(data, Dataset) else Dataset(data)
        given = {"schema": schema, **roles.given(), **splits, **options}
        if refused := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"{refused[0]}: is for a table in memory; {dataset.path} is a dataset")
        return dataset, None
    if isinstance(schema, str) and not is_uri(schema) and not Path(schema).exists():
        advice = "" if Path(schema).suffix else f"; label={schema!r} names the label's column"
        raise FileNotFoundError(f"schema {schema!r}: no such file{advice}")
    if (schema is None) == (roles.label is None):
        got = "neither" if schema is None else "both"
        raise ValueError(f"schema, label: expected a schema, or the label's column, got {got}")
    found = None
    if schema is None:
        data, found = roles.draft(data)
        schema = found.schema
    elif given := roles.given():
        name = next(iter(given))
        raise ValueError(f"{name}: is for a table without a schema; the schema says it")
    return Dataset.from_arrow(data, schema, **splits, verbose=verbose, **options), found
