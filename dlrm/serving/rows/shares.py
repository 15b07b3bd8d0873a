"""Shares of missing and unknown values in scored rows, which reveal data of another kind."""

from collections.abc import Sequence

import numpy as np

from dlrm.data.transform.transform import Transform

_MOST_FIELDS = 3  # fields that the line names


class Shares:
    """Counts missing and unknown values of each field, over blocks of rows.

    Args:
        known: for each categorical field, whether values had ids in training; () is yes for all.
        of_ids: for each categorical field, whether its values are ids, so that none is unknown; ()
            is no for all.
    """

    def __init__(
        self,
        numerical: Sequence[str],
        categorical: Sequence[str],
        known: Sequence[bool] = (),
        of_ids: Sequence[bool] = (),
    ) -> None:
        self._names, self._tables = [*numerical, *categorical], slice(len(numerical), None)
        self._known = np.array(known or [True] * len(categorical), bool)
        self._of_ids = np.array(of_ids or [False] * len(categorical), bool)
        self._missing, self._unknown = np.zeros((2, len(self._names)), np.int64)
        self._rows, self._only_ids = 0, False

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
        unknown = without_id.sum(0) - counts[self._tables]
        self._unknown[self._tables] += np.where(self._of_ids, 0, unknown)

    def add_ids(self, without_id: np.ndarray) -> None:
        """Counts rows with ids only, in which missing and unknown values are the same."""
        self.add(np.zeros((len(self._names), 0), bool), without_id)
        self._only_ids = True

    def line(self) -> str | None:
        """Returns a line about the fields with the most such values; None without any."""
        total = self._missing + self._unknown
        order = np.argsort(-total, kind="stable")[:_MOST_FIELDS].tolist()
        named = [index for index in order if total[index]]
        if not named:
            return None
        parts = [f"{self._names[index]} {self._of(index)}" for index in named]
        parts[0] = f"{self._names[named[0]]} is {self._of(named[0])} of the rows"
        rest = len(self._names[self._tables] if self._only_ids else self._names) - len(named)
        verb = "fields have" if rest > 1 else "field has"
        return f"values: {', '.join(parts)}" + f"; the other {rest} {verb} fewer" * (rest > 0)

    def unseen_values_warning(self) -> str | None:
        """Returns a line about fields of which no value was known in training, or None."""
        present, unknown = self._rows - self._missing[self._tables], self._unknown[self._tables]
        none = (unknown == present) & (present > 0) & self._known
        if self._only_ids or not none.any():
            return None
        names = [self._names[self._tables][index] for index in np.flatnonzero(none)]
        shown = ", ".join(names[:_MOST_FIELDS]) + ", ..." * (len(names) > _MOST_FIELDS)
        what, them = ("values", "them") if len(names) > 1 else ("value", "it")
        return f"no {what} of {shown} occurred in the training data, so scores ignore {them}"

    def by_field(self) -> list[tuple[str, float | None, float]]:
        """Returns name, share of missing and share of other values without an id of each field.

        If only ids are known, the share of missing values is None, and they count as values without
        an id.
        """
        shares = np.stack([self._missing, self._unknown], 1) / max(self._rows, 1)
        return [
            (name, None if self._only_ids else missing, unknown)
            for name, (missing, unknown) in zip(self._names, shares.tolist(), strict=True)
        ]

    def _of(self, index: int) -> str:
        word = "without an id" if self._only_ids else "unknown"
        counts = ((word, self._unknown[index]), ("missing", self._missing[index]))
        return " and ".join(f"{word} in {_percent(n / self._rows)}" for word, n in counts if n)


def shares_of(transform: Transform | None) -> Shares:
    """Returns counters of the values that a transform knows."""
    if transform is None:
        return Shares((), ())
    names = transform.schema.numerical_names, transform.schema.categorical_names
    return Shares(*names, [ids > 0 for ids in transform.own_ids], transform.of_ids)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= 0.0005 else "less than 0.1 %"
