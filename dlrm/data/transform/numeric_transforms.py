"""Numerical transforms: what a column of numbers becomes as an input of a model, and the inverse.

A schema names them by the keys of `NUMERIC_TRANSFORMS`. To add one, write a subclass of
`NumericTransform` and its entry: schemas, flags, fitting, reports and pages follow.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.sources.columns import Parsed
from dlrm.data.transform.numbers import Fitted, Sums

_NONE, _UNFITTED = np.empty(0), Fitted()


class NumericTransform:
    """Fits, applies and inverts the transform of a column.

    Attributes:
        name: name in schemas.
        meaning: the result for a value x, as the help of flags and the documentation describe it.
        needs_sums: whether `fit` needs the sums of the training values.
        bins: number of bins to fit if the field has no number of its own; 0 fits none.
        checked_in_readers: whether a value alone decides that its result is beyond float16, so that
            its row is refused when it is read. Other results are checked when they are computed.
        tolerance: error of results that reports ignore, though float16 is finer near 0.
        done, advice: parts of the message of `overflow`.
    """

    name: str
    meaning: str
    needs_sums = False
    bins = 0
    checked_in_readers = False
    tolerance = 0.0
    done = ""
    advice = "choose the transform log or standardise, or scale the column"

    def fit(self, sums: Sums, edges: np.ndarray = _NONE, shares: np.ndarray = _NONE) -> Fitted:
        """Returns the statistics of a column's training values.

        Args:
            sums: sums of the values; none unless `needs_sums`.
            edges, shares: the result of `bin_edges`; none unless bins are fitted.

        Raises:
            OverflowError: a statistic is beyond float64.
        """
        return Fitted(edges=edges, shares=shares)

    def apply(
        self,
        numbers: Parsed,
        fitted: Fitted = _UNFITTED,
        dtype: np.dtype = layout.NUMERICAL_DTYPE,
    ) -> tuple[np.ndarray, int]:
        """Returns the results of float64 values, infinite on overflow, and how many were clamped.

        They are computed in float64, and rounded to float32 and then to `dtype`.
        """
        results, clamped = self.results(numbers, fitted)
        with np.errstate(over="ignore"):
            return results.astype(np.float32).astype(dtype, copy=False), clamped

    def results(self, numbers: Parsed, fitted: Fitted) -> tuple[np.ndarray, int]:
        """Returns the results of `apply` in float64."""
        raise NotImplementedError

    def invert(self, results: np.ndarray, fitted: Fitted = _UNFITTED) -> np.ndarray:
        """Returns values that have the given results, for each one of them."""
        raise NotImplementedError

    def overflow(self, value: Any) -> str:
        """Returns a message that the result of a value is beyond float16, with a remedy."""
        greatest = np.finfo(layout.NUMERICAL_DTYPE).max
        return (
            f"{value}{self.done} is beyond float16 (up to {greatest:.0f}), in which numerical "
            f"features are stored; {self.advice}"
        )


class Log(NumericTransform):
    """The rule of the source document: ln(x + 2) of at least 1, with a missing x as 0."""

    name = "log"
    meaning = "ln(x + 2), with 0 for a missing x"
    added, of_missing = 2.0, 2.0  # the argument is x + added, or of_missing

    def results(self, numbers: Parsed, fitted: Fitted) -> tuple[np.ndarray, int]:
        arguments = np.where(numbers.missing, self.of_missing, numbers.values + self.added)
        clamped = int(np.count_nonzero(arguments < 1.0))
        return np.log(np.maximum(arguments, 1.0)), clamped

    def invert(self, results: np.ndarray, fitted: Fitted = _UNFITTED) -> np.ndarray:
        return np.exp(results) - self.added


class NvidiaLog(Log):
    """The rule of NVIDIA's code: ln(x + 3) of at least 1, and 0 for a missing x."""

    name = "nvidia"
    meaning = "ln(x + 3), and 0 if x is missing"
    added, of_missing = 3.0, 1.0


class Standardise(NumericTransform):
    """Subtracts the mean and divides by the standard deviation of the training values."""

    name = "standardise"
    meaning = "mean 0 and standard deviation 1 on the training rows, and 0 if x is missing"
    needs_sums = True
    tolerance = 1 / 512
    done = ", standardised,"
    advice = (
        "most training rows are much closer together; choose the transform log or quantile, or "
        "drop the column or the row"
    )

    def fit(self, sums: Sums, edges: np.ndarray = _NONE, shares: np.ndarray = _NONE) -> Fitted:
        return Fitted(*sums.scale(), edges, shares)

    def results(self, numbers: Parsed, fitted: Fitted) -> tuple[np.ndarray, int]:
        scaled = (numbers.values - fitted.mean) / fitted.deviation
        return np.where(numbers.missing, 0.0, scaled), 0

    def invert(self, results: np.ndarray, fitted: Fitted = _UNFITTED) -> np.ndarray:
        return results * fitted.deviation + fitted.mean


class Quantile(NumericTransform):
    """The share of training values below x, interpolated between the edges of the bins."""

    name = "quantile"
    meaning = "share of the training values below x, and 0.5 if x is missing"
    bins = 64

    def results(self, numbers: Parsed, fitted: Fitted) -> tuple[np.ndarray, int]:
        edges, shares = fitted.edges, fitted.shares
        if not len(edges):
            return np.full(numbers.values.shape, 0.5), 0
        return np.where(numbers.missing, 0.5, np.interp(numbers.values, edges, shares)), 0

    def invert(self, results: np.ndarray, fitted: Fitted = _UNFITTED) -> np.ndarray:
        if not len(fitted.edges):
            return np.zeros(len(results))
        return np.interp(results, fitted.shares, fitted.edges)


class Unchanged(NumericTransform):
    """Keeps x."""

    name = "none"
    meaning = "unchanged, and 0 if x is missing"
    checked_in_readers = True

    def results(self, numbers: Parsed, fitted: Fitted) -> tuple[np.ndarray, int]:
        return np.where(numbers.missing, 0.0, numbers.values), 0

    def invert(self, results: np.ndarray, fitted: Fitted = _UNFITTED) -> np.ndarray:
        return results


NUMERIC_TRANSFORMS: Mapping[str, NumericTransform] = {
    one.name: one for one in (Log(), NvidiaLog(), Standardise(), Quantile(), Unchanged())
}
# By the names that flags and `transform.json` of Criteo's logs have for them.
CRITEO_TRANSFORMS: Mapping[str, NumericTransform] = {
    "readme": NUMERIC_TRANSFORMS["log"],
    "nvidia": NUMERIC_TRANSFORMS["nvidia"],
}


def described(transforms: Mapping[str, NumericTransform]) -> str:
    """Returns names and meanings of transforms, for the help of a flag."""
    return "; ".join(f"{name}: {one.meaning}" for name, one in transforms.items())
