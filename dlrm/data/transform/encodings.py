"""Encodings: statistics of a categorical value over the training rows, as numbers.

For a value with n training rows, of total weight W(n), with positive rows of total weight P(n):

    count   log(1 + n), whatever the weights
    target  (P + s * prior) / (W + s): the share of positive rows, shrunk toward the prior, which
            is the share among all rows; s is the weight of `smoothing` rows of mean weight

The target of a training row uses only the rows of the other folds, and so does its prior, so that
the row's own label does not affect it. Missing values are one value, and a value without training
rows has n = 0.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.sources.columns import Coded, OfKeys, Parsed
from dlrm.data.transform.dictionaries import load_array
from dlrm.data.transform.fields import COUNT, TARGET, Encoding
from dlrm.data.transform.lookup import IdLookup
from dlrm.mapped_files import map_npy

MAX_WEIGHT = 1 << 31  # weights are below it, so that sums of many rows are exact
_NO_PRIOR = 0.5  # if no row has a weight
_HALF = 32  # bits after the binary point of a weight in sums


class Encoded:
    """The fitted encodings of a field.

    Args:
        keys: uint64, of the values in the training rows.
        values: float64 `[keys + 2, encodings]`: of values without training rows, of `keys` in
            order, and of missing values.
    """

    def __init__(self, keys: np.ndarray, values: np.ndarray) -> None:
        self.keys, self.values = keys, values
        self.folds: np.ndarray | None = None  # [keys + 2, folds], targets of training rows
        self._lookup: IdLookup | None = None
        self._missing = len(keys) + 1  # row of `values`
        self._places = OfKeys(self._places_of_keys, self._missing)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the arrays, by the names of their files."""
        return {"encoded_keys": self.keys, "encoded_values": self.values}

    @classmethod
    def load(cls, directory: Path, place: int, size: int, encodings: int) -> "Encoded":
        """Maps the files of a transform, of number `place` of its fields with encodings.

        Raises:
            FileNotFoundError, ValueError: a file is missing or damaged; the message names it.
        """
        keys = load_array(directory / f"encoded_keys_{place}.npy", np.dtype(np.uint64), (size,))
        path = directory / f"encoded_values_{place}.npy"
        return cls(keys, load_array(path, np.dtype(np.float64), (size + 2, encodings)))

    def use_lookup(self, directory: str | os.PathLike, column: int, place: int) -> None:
        """Loads the lookup, and the targets of training rows, from files of preprocessing.

        Encodings of earlier days' rows have no such files, and need none.
        """
        if IdLookup.paths(directory, column)[0].exists():
            self._lookup = IdLookup.load(directory, column, layout.id_dtype(len(self.keys) + 1))
        if (path := folds_path(directory, place)).exists():
            self.folds = map_npy(path)

    def _places_of_keys(self, column: Parsed) -> np.ndarray:
        """Returns the rows of `values` for keys."""
        self._lookup = self._lookup or IdLookup.from_dictionary(self.keys)
        return np.where(column.missing, self._missing, self._lookup(column).astype(np.int64))

    def __call__(
        self, encodings: Sequence[Encoding], column: Parsed | Coded, hashes: np.ndarray | None
    ) -> list[np.ndarray]:
        """Returns each encoding of the rows, float64.

        Args:
            hashes: hashes of training rows, which select their folds, if the encodings were fitted
                to these rows; None for other rows.
        """
        places = self._places(column)
        numbers = [self.values[places, i] for i in range(len(encodings))]
        for i, encoding in enumerate(encodings):
            if encoding.kind == TARGET and hashes is not None and self.folds is not None:
                numbers[i] = self.folds[places, fold_of(hashes, encoding.folds)]
        return numbers


def folds_path(directory: str | os.PathLike, place: int) -> Path:
    """Returns the file of training rows' targets by fold."""
    return Path(directory, f"folds_{place}.npy")


def fold_of(hashes: np.ndarray, folds: int) -> np.ndarray:
    """Returns the folds of training rows, given by 64-bit hashes."""
    return (((hashes >> np.uint64(32)) * np.uint64(folds)) >> np.uint64(32)).astype(np.int64)


class EncodingSums(NamedTuple):
    """Sums over the training rows with a value: integers `[folds, channels]`.

    A weight is two integers, before and after the binary point: sums of integers do not depend on
    the order. The first channel counts rows; the others follow the attributes.

    Attributes:
        folds: 1 if no encoding is of the target.
        target: whether to sum positive rows.
        weighted: whether to sum weights.
    """

    folds: int
    target: bool
    weighted: bool

    @classmethod
    def from_encodings(cls, encodings: Sequence[Encoding], weighted: bool) -> "EncodingSums":
        """Returns the cells that a field needs."""
        folds = [encoding.folds for encoding in encodings if encoding.kind == TARGET]
        return cls(folds[0] if folds else 1, bool(folds), bool(folds) and weighted)

    @property
    def channels(self) -> int:
        """Returns the number of channels of a fold."""
        return 5 if self.weighted else 1 + self.target

    @property
    def size(self) -> int:
        """Returns the number of integers of a value."""
        return self.folds * self.channels

    def add_up(
        self,
        places: np.ndarray,
        num_places: int,
        labels: np.ndarray,
        weights: np.ndarray | None,
        hashes: np.ndarray,
    ) -> np.ndarray:
        """Sums rows by the places of their values, int64 `[num_places, size]`."""
        bins = places * self.folds + fold_of(hashes, self.folds)
        addends: list[np.ndarray | None] = [None]  # counts rows
        if self.weighted:
            assert weights is not None
            whole = np.floor(weights.astype(np.float64))
            rest = np.rint((weights - whole) * 2.0**_HALF)
            addends += [whole, rest, whole * labels, rest * labels]
        elif self.target:
            addends.append(labels.astype(np.float64))
        sums = [np.bincount(bins, addend, num_places * self.folds) for addend in addends]
        return np.stack(sums, axis=1).astype(np.int64).reshape(num_places, self.size)

    def _sums(self, cells: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns rows, weights and positive weights of cells `[..., channels]`, as float64."""
        rows = cells[..., 0].astype(np.float64)
        if not self.weighted:
            return rows, rows, cells[..., 1].astype(np.float64)
        weights, positives = (cells[..., i] + cells[..., i + 1] * 2.0**-_HALF for i in (1, 3))
        return rows, weights, positives

    def target_of(self, cells: np.ndarray, totals: np.ndarray, smoothing: float) -> np.ndarray:
        """Returns the targets of values.

        Args:
            cells: cells of some rows, `[..., channels]`.
            totals: sums over all such rows, of any value.
        """
        rows, weights, positives = self._sums(totals)
        with np.errstate(divide="ignore", invalid="ignore"):
            prior = np.where(weights > 0, positives / weights, _NO_PRIOR)
            strength = smoothing * np.where(rows > 0, weights / rows, 0.0)
            _, weights, positives = self._sums(cells)
            shares = (positives + strength * prior) / (weights + strength)
            return np.where(weights + strength > 0, shares, prior)

    def encode(
        self, encodings: Sequence[Encoding], counts: np.ndarray, totals: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns the encodings of values.

        Args:
            counts: sums of the values, `[values, size]`.
            totals: sums of all training rows, `[size]`.

        Returns:
            The numbers `[values, encodings]`, and the targets of training rows `[values, folds]`,
            or None if no encoding is of the target.
        """
        cells, all_cells = (a.reshape(-1, self.folds, self.channels) for a in (counts, totals))
        whole, total = cells.sum(axis=1), all_cells.sum(axis=1)[0]
        values, by_fold = np.empty((len(cells), len(encodings))), None
        for i, encoding in enumerate(encodings):
            if encoding.kind == COUNT:
                # numpy's logarithm has other last bits on some processors.
                distinct, places = np.unique(whole[:, 0], return_inverse=True)
                values[:, i] = np.array([math.log1p(count) for count in distinct])[places]
                continue
            values[:, i] = self.target_of(whole, total, encoding.smoothing)
            others = whole[:, None] - cells, total - all_cells[0]
            by_fold = self.target_of(*others, encoding.smoothing)
        return values, by_fold

    def rows(self, counts: np.ndarray) -> np.ndarray:
        """Returns the number of training rows of values, `[values, folds]`."""
        return counts.reshape(-1, self.folds, self.channels)[..., 0]
