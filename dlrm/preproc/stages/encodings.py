"""Fits encodings: from counts of training rows by value and fold to the files of a transform."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from dlrm.data.transform.dictionaries import Counts, merge_counts
from dlrm.data.transform.encodings import EncodingSums, folds_path
from dlrm.data.transform.fields import COUNT, Encoding
from dlrm.data.transform.numbers import Sums, bin_edges, ordered
from dlrm.data.transform.schema import NumericalField
from dlrm.files import staged_file


class EncodedColumn(NamedTuple):
    """A field with encodings, whose counts are merged.

    Attributes:
        place: index of the field among those with encodings.
        encodings: encodings of the field.
        fields: field of each encoding's numbers.
        cells: the sums over training rows.
        totals: sums over all training rows; none while rows are counted.
    """

    place: int
    encodings: Sequence[Encoding]
    fields: Sequence[NumericalField]
    cells: EncodingSums
    totals: Sequence[int] = ()


def fit_encodings(
    column: EncodedColumn,
    size: int,
    parts: Iterable[tuple[np.ndarray, np.ndarray]],
    transform: str,
    lookups: str,
) -> dict[str, Any]:
    """Writes the encodings of a field with `size` values, some at a time.

    `parts` are keys, in the order of their `spread`, and the sums for each. Files for training rows
    are written to `lookups`.

    Returns:
        `size`, and for each encoding the facts of what is fitted to the numbers of training rows.
    """
    cells, num = column.cells, len(column.encodings)
    totals = np.array(column.totals, np.int64)
    collected = list(map(_Numbers, column.fields))
    none, no_key = np.zeros((1, cells.size), np.int64), np.empty(0, np.uint64)
    missing = totals.copy()[None]  # less those of all values
    with ExitStack() as stack:
        names = [f"encoded_{name}_{column.place}.npy" for name in ("keys", "values")]
        keys_file, values_file = (
            _array_file(stack, Path(transform, name), shape, dtype)
            for name, shape, dtype in zip(names, ((size,), (size + 2, num)), "QD", strict=True)
        )
        folds_file = None
        if cells.target:
            path = folds_path(lookups, column.place)
            folds_file = _array_file(stack, path, (size + 2, cells.folds), "D")
        for keys, counts in chain([(no_key, none)], parts, [(no_key, missing)]):
            values, by_fold = cells.encode(column.encodings, counts, totals)
            if counts is not missing:
                missing -= counts.sum(axis=0)
            keys_file.write(keys.tobytes())
            values_file.write(values.tobytes())
            if folds_file is not None and by_fold is not None:
                folds_file.write(by_fold.tobytes())
            rows = cells.rows(counts)
            for i, (encoding, numbers) in enumerate(zip(column.encodings, collected, strict=True)):
                if encoding.kind == COUNT or by_fold is None:
                    numbers.add(values[:, i], rows.sum(axis=1))
                else:
                    numbers.add(by_fold.ravel(), rows.ravel())
    return {"size": size, "fitted": [numbers.fitted() for numbers in collected]}


def _array_file(stack: ExitStack, path: Path, shape: tuple[int, ...], kind: str) -> BinaryIO:
    """Opens an array's file for its numbers: "Q" is uint64, "D" float64."""
    descr = {"Q": "<u8", "D": "<f8"}[kind]
    partial = stack.enter_context(staged_file(path, one_of_many=True))
    file = stack.enter_context(open(partial, "wb"))  # noqa: SIM115
    facts = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, facts)
    return file


class _Numbers:
    """The numbers that an encoding gives the training rows, to be fitted like a numerical field."""

    def __init__(self, field: NumericalField) -> None:
        self._field, self._sums = field, Sums()
        self._counts = Counts(np.empty(0, np.uint64), np.empty(0, np.int64))

    def add(self, values: np.ndarray, rows: np.ndarray) -> None:
        """Adds numbers with the number of training rows of each."""
        values, rows = values[rows > 0], rows[rows > 0]
        if self._field.rule.needs_sums:
            self._sums += Sums.repeated(values, rows)
        if self._field.fitted_bins:
            self._counts = merge_counts([self._counts, Counts(ordered(values), rows)])

    def fitted(self) -> dict[str, Any]:
        """Returns the facts of the fitted statistics."""
        bins = bin_edges(self._counts.keys, self._counts.counts, self._field.fitted_bins)
        return self._field.rule.fit(self._sums, *bins).to_dict()
