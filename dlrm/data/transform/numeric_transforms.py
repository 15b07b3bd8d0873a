"""Numerical transforms: what a column of numbers becomes as an input of a model, and the inverse.

A new one is a subclass of `NumericTransform`, its object in `NUMERIC_TRANSFORMS`, whose keys are
the names in a schema, and its meaning in `dlrm.data.choices`. Flags, reports and pages follow.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dlrm.data import choices
from dlrm.data.clicks import layout
from dlrm.data.sources import native
from dlrm.data.sources.columns import Parsed
from dlrm.data.transform.numbers import Fitted, Sums

_NONE, _UNFITTED = np.empty(0), Fitted()
_GREATEST = np.finfo(layout.NUMERICAL_DTYPE).max


class NumericTransform:
    """Fits, applies and inverts the transform of a column.

    Attributes:
        name: name in schemas.
        of_missing: result for a missing value.
        least: values below it are clamped to it, and counted.
        needs_sums: whether `fit` needs the sums of the training values.
        bins: number of bins to fit if the field has no number of its own; 0 fits none.
        checked_in_readers: whether readers refuse values whose results are beyond float16, which
            takes nothing fitted. Other results are checked when they are computed.
        tolerance: error of results that reports ignore, though float16 is finer near 0.
        done, advice: parts of the message of `overflow`.
    """

    name: str
    of_missing, least = 0.0, -np.inf
    needs_sums = checked_in_readers = False
    bins, tolerance = 0, 0.0
    done, advice = "", "choose the transform log or standardize, or scale the column"

    def fit(self, sums: Sums, edges: np.ndarray = _NONE, shares: np.ndarray = _NONE) -> Fitted:
        """Returns the statistics of the training values: of their sums and `bin_edges`.

        Raises:
            OverflowError: a statistic is beyond float64.
        """
        scale = sums.scale() if self.needs_sums else (0.0, 1.0)
        return Fitted(*scale, edges, shares)

    def apply(
        self, numbers: Parsed, fitted: Fitted = _UNFITTED, dtype: np.dtype = layout.NUMERICAL_DTYPE
    ) -> tuple[np.ndarray, int]:
        """Returns the results, infinite on overflow, and the number of values that were clamped.

        Results are rounded from float64 to float32, then to `dtype`.
        """
        values, missing = numbers
        clamped = np.count_nonzero((values < self.least) & ~missing)
        with np.errstate(over="ignore"):
            results = np.where(missing, self.of_missing, self.results(values, fitted))
            single = results.astype(np.float32)
            if dtype == np.float16 and native.host is not None:
                return native.host.to_half(single), int(clamped)
            return single.astype(dtype, copy=False), int(clamped)

    def results(self, values: np.ndarray, fitted: Fitted) -> np.ndarray:
        """Returns the results of values that are there, in float64."""
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
    added, least, of_missing = 2.0, -1.0, np.log(2.0)

    def results(self, values: np.ndarray, fitted: Fitted) -> np.ndarray:
        return np.log(np.maximum(values, self.least) + self.added)

    def invert(self, results: np.ndarray, fitted: Fitted) -> np.ndarray:
        return np.exp(results) - self.added


class NvidiaLog(Log):
    """The rule of NVIDIA's code; arguments are clamped to at least 1."""

    name = "nvidia"
    added, least, of_missing = 3.0, -2.0, 0.0


class Standardize(NumericTransform):
    """Subtracts the mean and divides by the standard deviation of the training values."""

    name = "standardize"
    needs_sums, tolerance = True, 1 / 512
    done = ", standardized,"
    advice = (
        "most training rows are much closer together; choose the transform log or quantile, or "
        "drop the column or the row"
    )

    def results(self, values: np.ndarray, fitted: Fitted) -> np.ndarray:
        return (values - fitted.mean) / fitted.deviation

    def invert(self, results: np.ndarray, fitted: Fitted) -> np.ndarray:
        return results * fitted.deviation + fitted.mean


class Quantile(NumericTransform):
    """Interpolates between the edges of bins, which are fitted to the training values."""

    name = "quantile"
    bins, of_missing = 64, 0.5

    def results(self, values: np.ndarray, fitted: Fitted) -> np.ndarray:
        if not len(fitted.edges):
            return np.full(values.shape, 0.5)
        return np.interp(values, fitted.edges, fitted.shares)

    def invert(self, results: np.ndarray, fitted: Fitted) -> np.ndarray:
        if not len(fitted.edges):
            return np.zeros(results.shape)
        return np.interp(results, fitted.shares, fitted.edges)


class Unchanged(NumericTransform):
    """Keeps numbers, which float16 must be able to represent."""

    name = "none"
    checked_in_readers = True

    def results(self, values: np.ndarray, fitted: Fitted) -> np.ndarray:
        return values

    def invert(self, results: np.ndarray, fitted: Fitted) -> np.ndarray:
        return results


NUMERIC_TRANSFORMS: Mapping[str, NumericTransform] = {
    rule.name: rule for rule in (Log(), NvidiaLog(), Standardize(), Quantile(), Unchanged())
}
# By their names in flags and `transform.json` of Criteo's logs.
CRITEO_TRANSFORMS: Mapping[str, NumericTransform] = {
    name: NUMERIC_TRANSFORMS[rule] for name, rule in choices.CRITEO_TRANSFORMS.items()
}
