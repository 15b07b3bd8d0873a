"""Fields with several ids a row: their layout in memory and in the files of a dataset.

A field whose number among the tables is i has, in each split, in place of `cat_<i>.bin`:

    cat_<i>.values.bin    ids, row after row, in `layout.id_dtype` of the table's cardinality
    cat_<i>.lengths.bin   number of ids of each row, in `lengths_dtype` of the greatest length
    cat_<i>.starts.bin    int64: the index in the values of each 4,096th row, and last how many ids
                          there are
    cat_<i>.weights.bin   float32, a weight for each id, where the field has weights

Only numpy and the standard library are imported.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlrm.data import layout
from dlrm.documents import brief

CHUNK = "split_binary_list"  # readers of one id per row refuse this type
ROWS_A_START = 4096
STARTS_DTYPE = np.dtype("<i8")
WEIGHTS_DTYPE = np.dtype("<f4")
POOLINGS = ("sum", "mean")
ATTENTION = "attention"  # pooling of a list with a candidate
MAX_LENGTH = int(np.iinfo(np.int32).max) - 2  # ids of a list; see `ListField.lengths_dtype`


class Jagged(NamedTuple):
    """Values of lists, row after row: ids of a field, or its keys before they are ids.

    Attributes:
        values: ids `[total]`, or a column of keys of `dlrm.data.sources.columns`.
        lengths: number of values of each row, `[rows]`.
        weights: a weight for each value, float32 `[total]`; None where all are 1.
    """

    values: Any
    lengths: np.ndarray
    weights: np.ndarray | None = None

    def take(self, rows: np.ndarray) -> "Jagged":
        """Returns the lists of the rows that a mask or indices select."""
        indices, lengths = indices_of(self.lengths, rows)
        weights = None if self.weights is None else self.weights[indices]
        return Jagged(self.values.take(indices), lengths, weights)

    def flatten(self, rows: np.ndarray) -> tuple[Any, np.ndarray]:
        """Returns the values of all rows, and the indices of those of some rows."""
        return self.values, indices_of(self.lengths, rows)[0]

    @property
    def rows(self) -> int:
        """Number of lists."""
        return len(self.lengths)

    @property
    def missing(self) -> np.ndarray:
        """Mask of empty lists."""
        return self.lengths == 0


def indices_of(lengths: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices of the values of the rows that a mask or indices select, and the lengths
    of these rows; `lengths` are of all rows.
    """
    chosen = lengths[rows].astype(np.int64)
    starts = (np.cumsum(lengths, dtype=np.int64) - lengths)[rows]
    before = np.cumsum(chosen) - chosen
    return np.repeat(starts - before, chosen) + np.arange(chosen.sum()), lengths[rows]


def row_of(lengths: np.ndarray, index: int) -> tuple[int, int]:
    """Returns the row of a value and its index in the row, from its index among all values."""
    ends = np.cumsum(lengths, dtype=np.int64)
    row = int(np.searchsorted(ends, index, side="right"))
    return row, int(index - ends[row] + lengths[row])


def check_values(
    values: np.ndarray,
    valid: np.ndarray,
    path: Path,
    first_row: int,
    expected: str,
    lengths: np.ndarray | None = None,
) -> None:
    """Raises ValueError for the first value of some rows of a file that is not valid.

    Args:
        lengths: number of values of each row; None is one each.
    """
    if not valid.all():
        index, item = int(valid.argmin()), ""
        row, got = index, values[index]
        if lengths is not None:
            row, position = row_of(lengths, index)
            item = f", place {position} of the list"
        raise ValueError(f"{path}: row {first_row + row}{item}: expected {expected}, got {got}")


Ids = np.ndarray | Jagged  # of a table: one per row, or several


def ids_in(column: Ids) -> np.ndarray:
    """Returns the ids of a table, row after row."""
    return column.values if isinstance(column, Jagged) else column


def take_rows(column: Ids, rows: np.ndarray) -> Ids:
    """Returns the ids of the rows that a mask or indices select."""
    return column.take(rows) if isinstance(column, Jagged) else column[rows]


def lists_in(columns: Sequence[Ids]) -> list[Jagged]:
    """Returns the columns of list fields."""
    return [column for column in columns if isinstance(column, Jagged)]


def interleave(
    columns: Sequence[Ids], num_rows: int, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Joins the ids of tables, sample by sample and table by table.

    Returns:
        Ids `[total]`, lengths `[num_rows, tables]`, and the weights of the ids, float32 `[total]`,
        or None if no field has weights.
    """
    lists = lists_in(columns)
    lengths_dtype = np.result_type(np.int8, *(bags.lengths.dtype for bags in lists))
    lengths = np.ones((num_rows, len(columns)), lengths_dtype)
    for table, column in enumerate(columns):
        if isinstance(column, Jagged):
            lengths[:, table] = column.lengths
    ends = np.cumsum(lengths, dtype=np.int64)
    begins = (ends - lengths.ravel()).reshape(lengths.shape)
    ids = np.empty(int(ends[-1]) if len(ends) else 0, dtype)
    weighted = any(bags.weights is not None for bags in lists)
    weights = np.ones(len(ids), WEIGHTS_DTYPE) if weighted else None
    for table, column in enumerate(columns):
        if not isinstance(column, Jagged):
            ids[begins[:, table]] = column
            continue
        shifts = begins[:, table] - (np.cumsum(column.lengths, dtype=np.int64) - column.lengths)
        indices = np.repeat(shifts, column.lengths)
        indices += np.arange(len(indices))
        ids[indices] = column.values
        if weights is not None and column.weights is not None:
            weights[indices] = column.weights
    return ids, lengths, weights


class ListField(NamedTuple):
    """A field with several ids a row, as `feature_spec.yaml` describes it under `list`.

    Attributes:
        max_length: maximum ids of a row.
        weighted: whether each id has a weight.
        pooling: "sum" or "mean" of the rows looked up, or "attention"; None follows `--pooling`.
        target: with "attention", the field of the candidate that items are compared with.
    """

    max_length: int
    weighted: bool = False
    pooling: str | None = None
    target: str | None = None

    @property
    def lengths_dtype(self) -> np.dtype:
        """Returns the dtype of the lengths, the narrowest signed one."""
        return layout.id_dtype(self.max_length + 1)

    def to_dict(self) -> dict[str, Any]:
        """Returns the YAML form, without default values."""
        defaults = self._field_defaults
        return {k: v for k, v in self._asdict().items() if defaults.get(k, self) != v}

    @classmethod
    def from_dict(cls, facts: Any, where: str = "list: ") -> "ListField":
        """Reads what `to_dict` returns; raises ValueError after `where` for another form."""
        if not isinstance(facts, dict) or not {"max_length"} <= set(facts) <= set(cls._fields):
            known = ", ".join(cls._fields)
            raise ValueError(f"{where}expected {known}, got {brief(facts)}")
        made = cls(**facts)
        is_length = type(made.max_length) is int and 1 <= made.max_length <= MAX_LENGTH
        is_attended = made.pooling == ATTENTION
        for name, holds, expected in (
            ("max_length", is_length, f"1 to {MAX_LENGTH}"),
            ("weighted", isinstance(made.weighted, bool), "true or false"),
            ("pooling", made.pooling in (None, *POOLINGS, ATTENTION), "sum, mean or attention"),
            ("target", is_attended == isinstance(made.target, str), "a field with attention only"),
        ):
            if not holds:
                value = brief(getattr(made, name))
                raise ValueError(f"{where}{name}: expected {expected}, got {value}")
        return made


class ListFiles(NamedTuple):
    """The files of a list field in a split; `weights` is None if it has none."""

    values: Path
    lengths: Path
    starts: Path
    weights: Path | None = None


def file_names(index: int, weighted: bool) -> list[str]:
    """Returns the files of field `index`, in the order of `ListFiles`."""
    names = ["values", "lengths", "starts", *["weights"] * weighted]
    return [f"cat_{index}.{name}.bin" for name in names]


def starts_within(lengths: np.ndarray, first_row: int, first_value: int) -> tuple[int, np.ndarray]:
    """Returns the entries of `cat_<i>.starts.bin` that rows from `first_row` on determine.

    Args:
        lengths: lengths of these rows.
        first_value: index of their first value in the split.

    Returns:
        The number of the first entry, and the entries; its last one, the total, is not among them.
    """
    first = -(-first_row // ROWS_A_START)
    begins = first_value + np.cumsum(lengths, dtype=np.int64) - lengths
    return first, begins[first * ROWS_A_START - first_row :: ROWS_A_START].astype(STARTS_DTYPE)


def num_starts(rows: int) -> int:
    """Returns the number of entries of `cat_<i>.starts.bin`."""
    return -(-rows // ROWS_A_START) + 1
