"""Fields derived from others, as a schema names them: encodings and crosses."""

import math
from dataclasses import dataclass, fields

from dlrm.documents import brief
from dlrm.settings import FORMER

COUNT, TARGET = ENCODINGS = ("count", "target")
MAX_FOLDS = 100
_OF_TARGET = ("folds", "smoothing")


@dataclass(frozen=True)
class Encoding:
    """A numerical feature with a statistic of a categorical value over the training rows.

    Attributes:
        kind: "count" is log(1 + n) for n training rows with the value. "target" is the share of
            positive rows among them; for a training row, that among rows of the other folds.
        name: name of the feature; None is the column, "_" and the kind.
        folds: number of folds of the training rows, for "target".
        smoothing: number of rows that the share of all rows counts as, for "target".
        transform, bins: transform of the feature, as in a `NumericalField`.
    """

    kind: str
    name: str | None = None
    folds: int = 5
    smoothing: float = 10.0
    transform: str = "standardize"
    bins: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ENCODINGS:
            raise ValueError(
                f"encodings: expected some of {', '.join(ENCODINGS)}, got {brief(self.kind)}"
            )
        where = f"encoding {self.kind}"
        object.__setattr__(self, "transform", FORMER.get(self.transform, self.transform))
        for field in fields(self):
            given = field.name in _OF_TARGET and getattr(self, field.name) != field.default
            if given and self.kind != TARGET:
                raise ValueError(f"{where}: {field.name}: expected the kind target beside it")
        if not 2 <= self.folds <= MAX_FOLDS:
            raise ValueError(f"{where}: folds: expected 2 to {MAX_FOLDS}, got {self.folds}")
        if not 0 <= self.smoothing < math.inf:
            raise ValueError(f"{where}: smoothing: expected 0 or more, got {self.smoothing}")

    def name_of(self, column: str) -> str:
        """Returns `name`, or the default name with a field of this column."""
        return self.name or f"{column}_{self.kind}"


@dataclass(frozen=True)
class Cross:
    """A categorical field whose values are the combinations of values of other fields.

    Attributes:
        fields: columns of two or more categorical fields, with one value per row.
        name: name of the field; None is the columns, joined by "_x_".
        buckets: number of ids, chosen by hash, that combinations without an id of their own share;
            0 gives them id 0, which is that of rows with a missing value.
        frequency_limit: combinations in at least this many training rows have ids of their own;
            None gives no combination its own id.
        max_ids: number of combinations with ids of their own, the most frequent ones; None is all.
        encodings: numerical features made of the combination.
    """

    fields: tuple[str, ...]
    name: str | None = None
    buckets: int = 0
    frequency_limit: int | None = None
    max_ids: int | None = None
    encodings: tuple[Encoding, ...] = ()

    def __post_init__(self) -> None:
        where = f"cross {self.column}"
        if len(self.fields) < 2 or len(set(self.fields)) < len(self.fields):
            raise ValueError(
                f"{where}: fields: expected two or more different ones, got "
                f"{brief(list(self.fields))}"
            )
        if self.frequency_limit is None:
            if self.buckets < 1:
                raise ValueError(
                    f"{where}: buckets: expected 1 or more, or a frequency_limit, got "
                    f"{self.buckets}; add `buckets: 100000` or `frequency_limit: 15`"
                )
            if self.max_ids is not None:
                raise ValueError(f"{where}: max_ids: expected a frequency_limit too, got none")

    @property
    def column(self) -> str:
        """Returns `name`, or the default name."""
        return self.name or "_x_".join(self.fields)
