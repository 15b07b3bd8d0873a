"""Inputs of a model, and their checks.

The served model also uses this file, so it imports only numpy and the standard library.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dlrm.data.bags import Jagged, ids_in, indices_of, interleave, lists_in, row_of
from dlrm.data.sources.row_error import RowError
from dlrm.data.transform.rows import in_list
from dlrm.data.transform.transform import stack_ids

FieldNames = tuple[Sequence[str], Sequence[str]]  # of the numerical and the categorical fields


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
        if self.lengths is None:
            return self.ids[row, table : table + 1]
        of_row = self.part(row, row + 1)
        assert of_row.lengths is not None
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
    """Raises ValueError if inputs do not match a model, or `RowError` if a value does not.

    Args:
        inputs: any rows, with floating-point numericals and weights, integer ids and lengths.
        table_sizes: the rows of its tables; an empty sequence takes any id.
        longest: see `check_values`.
    """
    check_shapes(inputs, *map(len, names))
    check_values(inputs, names, table_sizes, longest)


def check_shapes(inputs: Inputs, num_numerical: int, tables: int) -> None:
    """Raises ValueError if shapes or types of inputs do not match a model; reads no value."""
    numerical, ids, lengths, weights = inputs
    if numerical.ndim != 2 or numerical.shape[1] != num_numerical or numerical.dtype.kind != "f":
        raise ValueError(
            f"numericals: expected [rows, {num_numerical}] of a floating type, got "
            f"{list(numerical.shape)} of {numerical.dtype}"
        )
    of_rows = ids if lengths is None else lengths
    if of_rows.shape != (len(numerical), tables) or of_rows.dtype.kind not in "iu":
        raise ValueError(
            f"{'ids' if lengths is None else 'lengths'}: expected [{len(numerical)}, {tables}] of "
            f"an integer type, as there are {len(numerical)} rows of numericals, got "
            f"{list(of_rows.shape)} of {of_rows.dtype}"
        )
    if lengths is not None and (ids.ndim != 1 or ids.dtype.kind not in "iu"):
        raise ValueError(
            f"ids: expected [total] of an integer type, got {list(ids.shape)} of {ids.dtype}"
        )
    if weights is not None and (weights.shape != ids.shape or weights.dtype.kind != "f"):
        raise ValueError(
            f"weights: expected {list(ids.shape)} of a floating type, one for each id, got "
            f"{list(weights.shape)} of {weights.dtype}"
        )


def check_values(
    inputs: Inputs,
    names: FieldNames,
    table_sizes: Sequence[int],
    longest: Mapping[int, int] | None = None,
) -> None:
    """Raises RowError if a number is not finite, a length impossible or an id outside its table.

    Args:
        inputs: rows whose shapes and types match the model.
        table_sizes: the rows of its tables; an empty sequence takes any id.
        longest: for inputs with lengths, table -> maximum ids of a row; other tables have one id
            per row. None accepts any lengths.

    Raises:
        ValueError: lengths do not add up to the number of ids.
    """
    numerical, ids, lengths, _ = inputs
    if not np.isfinite(numerical).all():
        row, column = np.argwhere(~np.isfinite(numerical))[0]
        problem = f"expected a finite number, got {numerical[row, column]}"
        raise RowError(int(row), problem, names[0][column])
    if lengths is not None:
        _check_bags(inputs, table_sizes, names[1], longest)
    elif len(table_sizes):
        wrong = (ids < 0) | (ids >= np.asarray(table_sizes))
        if wrong.any():
            row, table = np.argwhere(wrong)[0]
            problem = _bad_id(table_sizes[table], ids[row, table])
            raise RowError(int(row), problem, _column(table, names[1]))


def check_lengths(
    inputs: Inputs, names: Sequence[str], longest: Mapping[int, int] | None = None
) -> None:
    """Raises RowError if there are lengths and one is impossible; see `check_values`.

    Raises:
        ValueError: they do not add up to the number of ids.
    """
    if inputs.lengths is None:
        return
    lengths, total = inputs.lengths, len(inputs.ids)
    tables = range(lengths.shape[1])
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


def _column(table: int, names: Sequence[str]) -> str:
    return f"{names[table]} (table {table})"


def _check_bags(
    inputs: Inputs,
    table_sizes: Sequence[int],
    names: Sequence[str],
    longest: Mapping[int, int] | None,
) -> None:
    check_lengths(inputs, names, longest)
    _, ids, lengths, weights = inputs
    assert lengths is not None
    tables = inputs.bags_of_ids() % max(lengths.shape[1], 1)
    problems = []
    if len(table_sizes):
        wrong = (ids < 0) | (ids >= np.asarray(table_sizes)[tables])
        problems.append((wrong, lambda i: _bad_id(table_sizes[int(tables[i])], int(ids[i]))))
    if weights is not None:
        infinite = ~np.isfinite(weights)
        problems.append((infinite, lambda i: f"expected a finite weight, got {weights[i]}"))
    for wrong, problem in problems:
        if wrong.any():
            bag, position = row_of(lengths.ravel(), first := int(wrong.argmax()))
            row, table = divmod(bag, lengths.shape[1])
            raise RowError(row, in_list(position, problem(first)), _column(table, names))


def _bad_id(size: int, got: int) -> str:
    return f"expected an id from 0 to {size - 1}, got {got}"
