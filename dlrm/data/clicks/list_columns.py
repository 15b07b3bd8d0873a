"""Reads fields with several ids per row, and orders the ids of a batch by its samples."""

from pathlib import Path

import numpy as np

from dlrm.data.clicks import bags, layout
from dlrm.data.clicks.bags import Jagged
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.verification import Verifier
from dlrm.mapped_files import map_file

_ROWS_AT_ONCE = 1 << 20


class ListColumn:
    """A list field of one split, memory-mapped; see `dlrm.data.clicks.bags` for the files.

    Args:
        rows: rows of the split, which match the sizes of the files (`FeatureSpec.num_rows`).

    Attributes:
        files, field: its entries in the specification.
    """

    def __init__(self, spec: FeatureSpec, split: str, name: str, rows: int) -> None:
        self.files, self.field = spec.list_files(split, name), spec.lists[name]
        starts = map_file(self.files.starts, bags.STARTS_DTYPE, (bags.num_starts(rows),))
        self._starts, self._total = starts.astype(np.int64), int(starts[-1])
        self._lengths = map_file(self.files.lengths, self.field.lengths_dtype, (rows,))
        self._values = map_file(self.files.values, spec.dtype(name), (self._total,))
        self._weights = None
        if self.files.weights is not None:
            self._weights = map_file(self.files.weights, bags.WEIGHTS_DTYPE, (self._total,))

    @property
    def num_ids(self) -> int:
        """The number of ids in all rows."""
        return self._total

    def read(self, begin: int, end: int) -> Jagged:
        """Returns rows `begin` to `end`, in time proportional to their number.

        Raises:
            ValueError: lengths contradict each other, or a weight is NaN or infinite; file and row
                are named.
        """
        first = begin // bags.ROWS_A_START
        known = first * bags.ROWS_A_START  # row of the entry in the starts
        lengths = self._lengths[known:end]
        self._check_lengths(lengths, known)
        ends = self._starts[first] + np.cumsum(lengths, dtype=np.int64)
        self._check_ends(ends, first, end)
        lengths_read = lengths[begin - known :]
        last = int(ends[-1]) if len(ends) else int(self._starts[first])
        start = last - int(lengths_read.sum(dtype=np.int64))
        weights = None
        if self._weights is not None:
            weights = self._weights[start:last]
            self._check_weights(weights, lengths_read, begin)
        return Jagged(self._values[start:last], lengths_read, weights)

    def _check_lengths(self, lengths: np.ndarray, first_row: int) -> None:
        longest = self.field.max_length
        if lengths.min(initial=0) < 0 or lengths.max(initial=0) > longest:
            row = int(((lengths < 0) | (lengths > longest)).argmax())
            raise ValueError(
                f"{self.files.lengths}: row {first_row + row}: expected a length of 0 to "
                f"{longest}, got {lengths[row]}"
            )

    def _check_ends(self, ends: np.ndarray, first: int, end: int) -> None:
        """Compares the ends of rows with the starts of each 4,096th row and of the last."""
        computed = ends[bags.ROWS_A_START - 1 :: bags.ROWS_A_START]
        if end == len(self._lengths) and end % bags.ROWS_A_START:
            computed = np.append(computed, ends[-1:])
        expected = self._starts[first : first + 1 + len(computed)]
        wrong = np.append(not 0 <= expected[0] <= self._total, computed != expected[1:])
        if wrong.any():
            number = int(wrong.argmax())
            row = min((first + number) * bags.ROWS_A_START, len(self._lengths))
            what = f"the lengths before row {row}"
            if not number:
                raise ValueError(
                    f"{self.files.starts}: expected {what} to add up to 0 to {self._total}, the "
                    f"number of ids, got {expected[0]}"
                )
            raise ValueError(
                f"{self.files.lengths}: expected {what} to add up to {expected[number]}, as "
                f"{self.files.starts.name} says, got {computed[number - 1]}"
            )
        if len(ends) and ends[-1] > self._total:
            raise ValueError(
                f"{self.files.lengths}: expected the lengths before row {end} to add up to at "
                f"most {self._total}, the number of ids, got {ends[-1]}"
            )

    def _check_weights(self, weights: np.ndarray, lengths: np.ndarray, first_row: int) -> None:
        if not np.isfinite(weights).all():
            place = int((~np.isfinite(weights)).argmax())
            row, of_row = bags.row_of(lengths, place)
            raise ValueError(
                f"{self.files.weights}: row {first_row + row}, place {of_row} of the list: "
                f"expected a finite weight, got {weights[place]}"
            )


class SampleWeights:
    """The sample weights of one split, memory-mapped; see `ListColumn`.

    Raises:
        ValueError: the file has another size than the rows need, or all weights are 0.
    """

    def __init__(self, path: Path, rows: int, verifier: Verifier | None) -> None:
        layout.check_rows(path, rows, layout.WEIGHT_DTYPE.itemsize)
        self.path, self._weights = path, map_file(path, layout.WEIGHT_DTYPE, (rows,))
        if verifier is not None:
            verifier.check([path])
        blocks = range(0, rows, _ROWS_AT_ONCE)
        if rows and not any(self._weights[row : row + _ROWS_AT_ONCE].any() for row in blocks):
            raise ValueError(f"{path}: expected a weight above 0, got {rows:,} zeros")

    def read(self, begin: int, end: int) -> np.ndarray:
        """Returns the weights of rows `begin` to `end`.

        Raises:
            ValueError: a weight is negative, NaN or infinite.
        """
        weights = self._weights[begin:end]
        if not (np.isfinite(weights).all() and weights.min(initial=0) >= 0):
            row = int((~(np.isfinite(weights) & (weights >= 0))).argmax())
            raise ValueError(
                f"{self.path}: row {begin + row}: expected a weight of 0 or more, got "
                f"{weights[row]}"
            )
        return weights
