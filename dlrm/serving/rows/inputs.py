"""Inputs of a model, and their checks.

The served model also uses this file, so it imports neither torch nor Arrow.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dlrm.data.bags import Jagged, ids_in, indices_of, interleave, lists_in, row_of
from dlrm.data.sources.row_error import RowError
from dlrm.data.transform.rows import in_list
from dlrm.data.transform.transform import stack_ids
from dlrm.metrics.table import unscored_text

FieldNames = tuple[Sequence[str], Sequence[str]]  # of the numerical and the categorical fields


class ScoreError(RowError):
    """A row whose score is not finite."""


class Inputs(NamedTuple):
    """Numbers and ids of rows, as a model takes them.

    Attributes:
        numerical: `[rows, num_numerical]`.
        ids: `[rows, tables]`; with `lengths`, `[total]`, row after row and table by table.
        lengths: ids of each row and table, `[rows, tables]`; None is one each.
        weights: a factor for the vector of each id, float32 `[total]`; None is 1 for each.
    """

    numerical: np.ndarray
    ids: np.ndarray
    lengths: np.ndarray | None = None
    weights: np.ndarray | None = None

    @classmethod
    def from_columns(cls, numerical: np.ndarray, ids: Sequence[np.ndarray | Jagged]) -> "Inputs":
        """Returns the inputs of transformed rows.

        Args:
            numerical: `[rows, num_numerical]`.
            ids: for each table, one id per row, or bags.
        """
        if not lists_in(ids):
            return cls(numerical, stack_ids(ids, len(numerical)))
        dtypes = [ids_in(column).dtype for column in ids]
        return cls(numerical, *interleave(ids, len(numerical), np.result_type(np.int8, *dtypes)))

    @classmethod
    def joined(cls, parts: Sequence["Inputs"]) -> "Inputs":
        """Returns the rows of several inputs, all or none of which have lengths and weights."""
        columns = zip(*(part.arrays for part in parts), strict=True)
        return cls(*(np.concatenate(arrays) for arrays in columns))

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Returns the present tensors, in the order of an exported model's inputs."""
        return tuple(array for array in self if array is not None)

    @property
    def num_tables(self) -> int:
        """Number of tables that the ids refer to."""
        return (self.ids if self.lengths is None else self.lengths).shape[1]

    def part(self, begin: int, end: int) -> "Inputs":
        """Returns the rows from `begin` to `end`, as views."""
        rows = slice(begin, end)
        if self.lengths is None:
            return Inputs(self.numerical[rows], self.ids[rows])
        first = int(self.lengths[:begin].sum(dtype=np.int64))
        return self._at(rows, slice(first, first + int(self.lengths[rows].sum(dtype=np.int64))))

    def take(self, rows: np.ndarray) -> "Inputs":
        """Returns the rows that a mask or indices select."""
        if self.lengths is None:
            return Inputs(self.numerical[rows], self.ids[rows])
        return self._at(rows, indices_of(self.lengths.sum(1, dtype=np.int64), rows)[0])

    def _at(self, rows: slice | np.ndarray, indices: slice | np.ndarray) -> "Inputs":
        assert self.lengths is not None
        weights = None if self.weights is None else self.weights[indices]
        return Inputs(self.numerical[rows], self.ids[indices], self.lengths[rows], weights)

    def ids_of(self, row: int, table: int) -> np.ndarray:
        """Returns the ids of a row for a table."""
        of_row = self.part(row, row + 1)
        if of_row.lengths is None:
            return of_row.ids[0, table : table + 1]
        first = int(of_row.lengths[0, :table].sum(dtype=np.int64))
        return of_row.ids[first : first + of_row.lengths[0, table]]

    def bags_of_ids(self) -> np.ndarray:
        """Returns, for each id of inputs with lengths, its row times the tables, plus its table."""
        assert self.lengths is not None
        return np.repeat(np.arange(self.lengths.size), self.lengths.ravel())

    def without_id(self) -> np.ndarray:
        """Returns a mask of tables for which a row has no id above 0, bool `[rows, tables]`."""
        if self.lengths is None:
            return self.ids == 0
        known = np.zeros(self.lengths.size, bool)
        known[self.bags_of_ids()[self.ids != 0]] = True
        return ~known.reshape(self.lengths.shape)


def check_inputs(
    inputs: Inputs,
    names: FieldNames,
    table_sizes: Sequence[int],
    longest: Mapping[int, int] | None = None,
) -> None:
    """Checks inputs; see `check_lengths` and `check_values`."""
    check_lengths(inputs, names, longest)
    check_values(inputs, names, table_sizes)


def check_lengths(
    inputs: Inputs, names: FieldNames, longest: Mapping[int, int] | None = None
) -> None:
    """Checks shapes, types and lengths of inputs, and reads no other values.

    Args:
        names: names of the model's numerical and categorical fields.
        longest: table -> maximum ids of a row; other tables have one id per row. None accepts any
            lengths.

    Raises:
        ValueError: shapes or types do not match the model, whose numericals and weights have a
            floating type, and ids and lengths an integer one; or lengths do not add up to the ids.
        RowError: a length is impossible.
    """
    numerical, ids, lengths, weights = inputs
    rows, tables = len(numerical) if numerical.ndim else 0, range(len(names[1]))
    _check_array("numericals", numerical, (rows, len(names[0])), "f")
    if lengths is None:
        _check_array("ids", ids, (rows, len(tables)), "iu")
        return
    _check_array("lengths", lengths, (rows, len(tables)), "iu")
    _check_array("ids", ids, (ids.size,), "iu")
    if weights is not None:
        _check_array("weights", weights, ids.shape, "f")
    total = len(ids)
    least = np.array([int(longest is not None and table not in longest) for table in tables])
    most = np.array([total if longest is None else longest.get(table, 1) for table in tables])
    wrong = (lengths < least) | (lengths > most)
    if wrong.any():
        row, table = map(int, np.argwhere(wrong)[0])
        expected = "1" if least[table] else f"0 to {most[table]}"
        problem = f"expected a length of {expected}, got {lengths[row, table]}"
        raise RowError(row, problem, _column(table, names))
    if (added := int(lengths.sum(dtype=np.int64))) != total:
        raise ValueError(f"lengths: expected a sum of {total}, the number of ids, got {added}")


def _check_array(name: str, array: np.ndarray, shape: tuple[int, ...], kinds: str) -> None:
    if array.shape != shape or array.dtype.kind not in kinds:
        type_ = "a floating type" if kinds == "f" else "an integer type"
        got = f"{list(array.shape)} of {array.dtype}"
        raise ValueError(f"{name}: expected {list(shape)} of {type_}, got {got}")


def check_values(inputs: Inputs, names: FieldNames, table_sizes: Sequence[int]) -> None:
    """Raises RowError if a number or weight is not finite, or an id outside its table.

    Args:
        inputs: rows whose shapes, types and lengths match the model.
        table_sizes: the rows of its tables; an empty sequence takes any id.
    """
    numerical, ids, lengths, weights = inputs
    if not np.isfinite(numerical).all():
        row, column = np.argwhere(~np.isfinite(numerical))[0]
        problem = f"expected a finite number, got {numerical[row, column]}"
        raise RowError(int(row), problem, names[0][column])
    if len(table_sizes):
        sizes = np.asarray(table_sizes)
        if lengths is not None:
            sizes = sizes[inputs.bags_of_ids() % max(lengths.shape[1], 1)]
        wrong = (ids < 0) | (ids >= sizes)
        _refuse(inputs, names, wrong, ids, lambda i: f"an id from 0 to {table_sizes[i] - 1}")
    if weights is not None:
        _refuse(inputs, names, ~np.isfinite(weights), weights, lambda i: "a finite weight")


def _refuse(
    inputs: Inputs,
    names: FieldNames,
    wrong: np.ndarray,
    values: np.ndarray,
    expected: Callable[[int], str],
) -> None:
    """Raises RowError for the first wrong one of the values of ids."""
    if not wrong.any():
        return
    bag = index = int(wrong.argmax())
    position = None
    if inputs.lengths is not None:
        bag, position = row_of(inputs.lengths.ravel(), index)
    row, table = divmod(bag, inputs.num_tables)
    problem = f"expected {expected(table)}, got {values.flat[index]}"
    problem = problem if position is None else in_list(position, problem)
    raise RowError(row, problem, _column(table, names))


def _column(table: int, names: FieldNames) -> str:
    return f"{names[1][table]} (table {table})"


def check_scores(scores: np.ndarray) -> None:
    """Raises ScoreError for the first row whose score, `[rows]` or `[rows, 1]`, is not finite."""
    if not np.isfinite(scores).all():
        row = int(np.isfinite(scores).argmin())
        raise ScoreError(row, unscored_text(float(scores.flat[row])))
