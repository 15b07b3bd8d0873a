"""Reads fields with several ids per row."""

import numpy as np

from dlrm.data import bags
from dlrm.data.bags import ROWS_A_START, Jagged, check_values
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.layout import map_rows


class ListColumn:
    """A list field of one split, memory-mapped; see `dlrm.data.bags` for the files.

    Args:
        rows: rows of the split.

    Attributes:
        files, field: its entries in the specification.

    Raises:
        FileNotFoundError, ValueError: a file is missing, or has another size than these rows need.
    """

    def __init__(self, spec: FeatureSpec, split: str, name: str, rows: int) -> None:
        self.files, self.field = files, field = spec.list_files(split, name), spec.lists[name]
        starts = map_rows(files.starts, bags.STARTS_DTYPE, (bags.num_starts(rows),), "starts")
        self._starts, total = starts.astype(np.int64), (int(starts[-1]),)
        self._lengths = map_rows(files.lengths, field.lengths_dtype, (rows,))
        self._values = map_rows(files.values, spec.dtype(name), total, "ids")
        self._weights = None
        if files.weights is not None:
            self._weights = map_rows(files.weights, bags.WEIGHTS_DTYPE, total, "weights")

    def read(self, begin: int, end: int) -> Jagged:
        """Returns rows `begin` to `end`, in time proportional to their number.

        Raises:
            ValueError: lengths contradict each other, or a weight is NaN or infinite; file and row
                are named.
        """
        first = begin // ROWS_A_START
        known = first * ROWS_A_START  # row of the entry in the starts
        lengths, longest = self._lengths[known:end], self.field.max_length
        valid, expected = (lengths >= 0) & (lengths <= longest), f"a length of 0 to {longest}"
        check_values(lengths, valid, self.files.lengths, known, expected)
        ends = np.append(self._starts[first], lengths).cumsum()
        self._check_ends(ends, first, end)
        start, last, lengths = ends[begin - known], ends[-1], lengths[begin - known :]
        weights = None if self._weights is None else self._weights[start:last]
        if weights is not None and self.files.weights is not None:
            valid, path = np.isfinite(weights), self.files.weights
            check_values(weights, valid, path, begin, "a finite weight", lengths)
        return Jagged(self._values[start:last], lengths, weights)

    def _check_ends(self, ends: np.ndarray, first: int, end: int) -> None:
        """Compares the ends of rows with the starts of each 4,096th row and of the last."""
        what = f"{self.files.lengths}: expected the lengths before row"
        for row, total in ((first * ROWS_A_START, ends[0]), (end, ends[-1])):
            if not 0 <= total <= len(self._values):
                raise ValueError(
                    f"{what} {row} to add up to 0 to {len(self._values)}, the number of ids, got "
                    f"{total}"
                )
        known = ends[::ROWS_A_START]
        if end == len(self._lengths) and end % ROWS_A_START:
            known = np.append(known, ends[-1])
        expected = self._starts[first : first + len(known)]
        if (wrong := known != expected).any():
            number = int(wrong.argmax())
            row = min((first + number) * ROWS_A_START, len(self._lengths))
            raise ValueError(
                f"{what} {row} to add up to {expected[number]}, as {self.files.starts.name} says, "
                f"got {known[number]}"
            )
