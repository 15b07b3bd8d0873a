"""Numerical transforms: what a column of numbers becomes as an input of a model, and the inverse.

A new one is a subclass of `NumericTransform` and its entry in `NUMERIC_TRANSFORMS`, whose keys are
the names in a schema. Flags, fitting, reports and pages follow.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np

from dlrm.data import choices
from dlrm.data.clicks import layout
from dlrm.data.sources import native
from dlrm.data.sources.columns import Parsed
from dlrm.data.transform.numbers import Fitted, Sums

_NONE, _UNFITTED = np.empty(0), Fitted()
_GREATEST = np.finfo(layout.NUMERICAL_DTYPE).max
_WARNING = nullcontext()  # as numpy does by default


class NumericTransform:
    """Fits, applies and inverts the transform of a column.

    Attributes:
        name: name in schemas.
        needs_sums: whether `fit` needs the sums of the training values.
        bins: number of bins to fit if the field has no number of its own; 0 fits none.
        checked_in_readers: whether readers refuse values whose results are beyond float16, which
            takes nothing fitted. Other results are checked when they are computed.
        bounded: whether all results are within float16.
        tolerance: error of results that reports ignore, though float16 is finer near 0.
        done, advice: parts of the message of `overflow`.
    """

    name: str
    needs_sums = checked_in_readers = bounded = False
    bins, tolerance = 0, 0.0
    done, advice = "", "choose the transform log or standardize, or scale the column"

    @property
    def meaning(self) -> str:
        """Returns the result for a value x, for the help of flags and the documentation."""
        return choices.NUMERIC_TRANSFORMS[self.name]

    def fit(self, sums: Sums, edges: np.ndarray = _NONE, shares: np.ndarray = _NONE) -> Fitted:
        """Returns the statistics of the training values: of their sums and `bin_edges`.

        Raises:
            OverflowError: a statistic is beyond float64.
        """
        return Fitted(edges=edges, shares=shares)

    def apply(
        self, numbers: Parsed, fitted: Fitted = _UNFITTED, dtype: np.dtype = layout.NUMERICAL_DTYPE
    ) -> tuple[np.ndarray, int]:
        """Returns the results, infinite on overflow, and the number of values that were clamped.

        Results are rounded from float64 to float32, then to `dtype`.
        """
        results, clamped = self.results(numbers, fitted)
        with _WARNING if self.bounded else np.errstate(over="ignore"):  # which takes a microsecond
            single = results.astype(np.float32)
            if dtype == np.float16 and native.host is not None:
                return native.host.to_half(single), clamped
            return single.astype(dtype, copy=False), clamped

    def results(self, numbers: Parsed, fitted: Fitted) -> tuple[np.ndarray, int]:
        """Returns what `apply` does, in float64."""
        raise NotImplementedError

    def invert(self, results: np.ndarray, fitted: Fitted) -> np.ndarray:
        """Returns a value for each result that has this result."""
        raise NotImplementedError

    def overflow(self, value: Any) -> str:
        """Returns a message that the result of a value is beyond float16, with a remedy."""
        return (
            f"{value}{self.done} is beyond float16 (up to {_GREATEST:.0f}), in which numerical "
            f"features are stored; {self.advice}"
        )


class Log(NumericTransform):
    """The rule of the source document; arguments are clamped to at least 1."""

    name = "log"
    bounded = True
    added, of_missing = 2.0, 2.0  # the argument is x + added, or of_missing

    def results(self, numbers: Parsed, fitted: Fitted) -> tuple[np.ndarray, int]:
        arguments = np.where(numbers.missing, self.of_missing, numbers.values + self.added)
        clamped = int(np.count_nonzero(arguments < 1.0))
        return np.log(np.maximum(arguments, 1.0) if clamped else arguments), clamped

    def invert(self, results: np.ndarray, fitted: Fitted) -> np.ndarray:
        return np.exp(results) - self.added


class NvidiaLog(Log):
    """The rule of NVIDIA's code; arguments are clamped to at least 1."""

    name = "nvidia"
    added, of_missing = 3.0, 1.0


class Standardize(NumericTransform):
    """Subtracts the mean and divides by the standard deviation of the training values."""

    name = "standardize"
    needs_sums, tolerance = True, 1 / 512
    done = ", standardized,"
    advice = (
        "most training rows are much closer together; choose the transform log or quantile, or "
        "drop the column or the row"
    )

    def fit(self, sums: Sums, edges: np.ndarray = _NONE, shares: np.ndarray = _NONE) -> Fitted:
        return Fitted(*sums.scale(), edges, shares)

    def results(self, numbers: Parsed, fitted: Fitted) -> tuple[np.ndarray, int]:
        scaled = (numbers.values - fitted.mean) / fitted.deviation
        return np.where(numbers.missing, 0.0, scaled), 0

    def invert(self, results: np.ndarray, fitted: Fitted) -> np.ndarray:
        return results * fitted.deviation + fitted.mean


class Quantile(NumericTransform):
    """Interpolates between the edges of bins, which are fitted to the training values."""

    name = "quantile"
    bins, bounded = 64, True

    def results(self, numbers: Parsed, fitted: Fitted) -> tuple[np.ndarray, int]:
        if not len(fitted.edges):
            return np.full(numbers.values.shape, 0.5), 0
        shares = np.interp(numbers.values, fitted.edges, fitted.shares)
        return np.where(numbers.missing, 0.5, shares), 0

    def invert(self, results: np.ndarray, fitted: Fitted) -> np.ndarray:
        if not len(fitted.edges):
            return np.zeros(results.shape)
        return np.interp(results, fitted.shares, fitted.edges)


class Unchanged(NumericTransform):
    """Keeps numbers, which float16 must be able to represent."""

    name = "none"
    checked_in_readers = True

    def results(self, numbers: Parsed, fitted: Fitted) -> tuple[np.ndarray, int]:
        return np.where(numbers.missing, 0.0, numbers.values), 0

    def invert(self, results: np.ndarray, fitted: Fitted) -> np.ndarray:
        return results


NUMERIC_TRANSFORMS: Mapping[str, NumericTransform] = {
    rule.name: rule for rule in (Log(), NvidiaLog(), Standardize(), Quantile(), Unchanged())
}
# By their names in flags and `transform.json` of Criteo's logs.
CRITEO_TRANSFORMS: Mapping[str, NumericTransform] = {
    name: NUMERIC_TRANSFORMS[rule] for name, rule in choices.CRITEO_TRANSFORMS.items()
}
