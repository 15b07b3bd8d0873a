"""Shares of missing and unknown values in scored rows, which reveal data of another kind."""

from collections.abc import Sequence

import numpy as np

from dlrm.data.transform.transform import Transform

_MOST_FIELDS = 3  # fields that the line names


class Shares:
    """Counts missing and unknown values of each field, over blocks of rows.

    Args:
        known: for each categorical field, whether values had ids in training; None is yes.
        of_ids: for each categorical field, whether its values are ids, so that none is unknown.
    """

    def __init__(
        self,
        numerical: Sequence[str],
        categorical: Sequence[str],
        known: Sequence[bool] | None = None,
        of_ids: Sequence[bool] | None = None,
    ) -> None:
        self._may_lack_ids = ~np.array(of_ids or [False] * len(categorical), bool)
        self._known = np.array([True] * len(categorical) if known is None else known, bool)
        self._names = [*numerical, *categorical]
        self._first_table = len(numerical)
        self._missing = np.zeros(len(self._names), np.int64)
        self._unknown = np.zeros(len(self._names), np.int64)
        self._rows, self._word = 0, "unknown"

    def add(self, missing: np.ndarray, without_id: np.ndarray) -> None:
        """Counts fields of rows that have no value, or an empty list, and those without an id.

        Args:
            missing: mask of fields without a value, bool `[fields, rows]`.
            without_id: mask of fields without an id, bool `[rows, tables]`: the value, or all of a
                list, is id 0.
        """
        counts = missing.sum(1)
        self._rows += len(without_id)
        self._missing += counts
        # A missing value has no id either.
        unknown = without_id.sum(0) - counts[self._first_table :]
        self._unknown[self._first_table :] += np.where(self._may_lack_ids, unknown, 0)

    def add_ids(self, without_id: np.ndarray) -> None:
        """Counts rows with ids only, in which missing and unknown values are the same."""
        self.add(np.zeros((len(self._names), 0), bool), without_id)
        self._word = "without an id"

    def line(self) -> str | None:
        """Returns a line about the fields with the most such values; None without any."""
        total = self._missing + self._unknown
        order = np.argsort(-total, kind="stable")[:_MOST_FIELDS]
        named = [index for index in order.tolist() if total[index]]
        if not named:
            return None
        first, *others = named
        parts = [f"{self._names[first]} is {self._of(first)} of the rows"]
        parts += [f"{self._names[index]} {self._of(index)}" for index in others]
        counted = len(self._names) - (self._first_table if self._word != "unknown" else 0)
        rest = counted - len(named)
        verb = "fields have" if rest > 1 else "field has"
        fewer = f"; the other {rest} {verb} fewer" if rest else ""
        return f"values: {', '.join(parts)}{fewer}"

    def unseen_values_warning(self) -> str | None:
        """Returns a line about fields of which no value was known in training, or None."""
        present = self._rows - self._missing[self._first_table :]
        none = (self._unknown[self._first_table :] == present) & (present > 0) & self._known
        if self._word != "unknown" or not none.any():
            return None
        names = [self._names[self._first_table + i] for i in np.flatnonzero(none)]
        shown = ", ".join(names[:_MOST_FIELDS]) + ", ..." * (len(names) > _MOST_FIELDS)
        if len(names) == 1:
            return f"no value of {shown} occurred in the training data, so scores ignore it"
        return f"no values of {shown} occurred in the training data, so scores ignore them"

    def by_field(self) -> list[tuple[str, float | None, float]]:
        """Returns name, share of missing and share of other values without an id of each field.

        If only ids are known, the share of missing values is None, and they count as values without
        an id.
        """
        rows, only_ids = max(self._rows, 1), self._word != "unknown"
        counts = zip(self._names, self._missing.tolist(), self._unknown.tolist(), strict=True)
        return [(n, None if only_ids else m / rows, unknown / rows) for n, m, unknown in counts]

    def _of(self, index: int) -> str:
        counts = ((self._word, self._unknown[index]), ("missing", self._missing[index]))
        return " and ".join(f"{word} in {_percent(n / self._rows)}" for word, n in counts if n)


def shares_of(transform: Transform | None) -> Shares:
    """Returns counters of the values that a transform knows."""
    if transform is None:
        return Shares((), ())
    names = transform.schema.numerical_names, transform.schema.categorical_names
    return Shares(*names, [ids > 0 for ids in transform.own_ids], transform.of_ids)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= 0.0005 else "less than 0.1 %"
