"""Numerical transforms: what a column of numbers becomes as an input of a model, and the inverse.

A new one is an entry of `NUMERIC_TRANSFORMS`, whose keys are the names in a schema, and its meaning
in `dlrm.data.choices`. Flags, fitting, reports and pages follow.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlrm.data import layout
from dlrm.data.schema.numbers import Fitted, Sums
from dlrm.data.sources import native
from dlrm.data.sources.columns import Parsed

_NONE, _UNFITTED = np.empty(0), Fitted()
_GREATEST = np.finfo(layout.NUMERICAL_DTYPE).max


@dataclass(frozen=True)
class NumericTransform:
    """Fits, applies and inverts the transform of a column.

    Attributes:
        note: its description in the documentation.
        results: function of values and what was fitted to the results, in float64.
        invert: function of results and what was fitted to values that have these results.
        of_missing: result for a missing value.
        least: values below it are clamped to it, and counted; None for none.
        needs_sums: whether `fit` needs the sums of the training values.
        bins: number of bins to fit if the field has no number of its own; 0 fits none.
        checked_in_readers: whether readers refuse values whose results are beyond float16, which
            takes nothing fitted. Other results are checked when they are computed.
        tolerance: error of results that reports ignore, though float16 is finer near 0.
        done, advice: parts of the message of `overflow`.
    """

    note: str
    results: Callable[[np.ndarray, Fitted], np.ndarray]
    invert: Callable[[np.ndarray, Fitted], np.ndarray]
    of_missing: float = 0.0
    least: float | None = None
    needs_sums: bool = False
    bins: int = 0
    checked_in_readers: bool = False
    tolerance: float = 0.0
    done: str = ""
    advice: str = "choose the transform log or standardize, or scale the column"

    def fit(self, sums: Sums, edges: np.ndarray = _NONE, shares: np.ndarray = _NONE) -> Fitted:
        """Returns the statistics of the training values: of their sums and `bin_edges`.

        Raises:
            OverflowError: a statistic is beyond float64.
        """
        return Fitted(*(sums.scale() if self.needs_sums else (0.0, 1.0)), edges, shares)

    def apply(
        self, numbers: Parsed, fitted: Fitted = _UNFITTED, dtype: np.dtype = layout.NUMERICAL_DTYPE
    ) -> tuple[np.ndarray, int]:
        """Returns the results, infinite on overflow, and the number of values that were clamped.

        Results are rounded from float64 to float32, then to `dtype`.
        """
        (values, missing), clamped = numbers, 0
        if self.least is not None:
            clamped = int(np.count_nonzero((values < self.least) & ~missing))
            values = np.maximum(values, self.least) if clamped else values
        with np.errstate(over="ignore"):
            results = np.where(missing, self.of_missing, self.results(values, fitted))
            single = results.astype(np.float32)
            if dtype == np.float16 and native.host is not None:
                return native.host.to_half(single), clamped
            return single.astype(dtype, copy=False), clamped

    def overflow(self, value: Any) -> str:
        """Returns a message that the result of a value is beyond float16, with a remedy."""
        return (
            f"{value}{self.done} is beyond float16 (up to {_GREATEST:.0f}), in which numerical "
            f"features are stored; {self.advice}"
        )


def _share(values: np.ndarray, fitted: Fitted) -> np.ndarray:
    if not len(fitted.edges):
        return np.full(values.shape, 0.5)
    return np.interp(values, fitted.edges, fitted.shares)


def _value_of_share(shares: np.ndarray, fitted: Fitted) -> np.ndarray:
    if not len(fitted.edges):
        return np.zeros(shares.shape)
    return np.interp(shares, fitted.shares, fitted.edges)


NUMERIC_TRANSFORMS = {
    "log": NumericTransform(
        "The rule of the source document; arguments are clamped to at least 1.",
        lambda values, _: np.log(values + 2.0),
        lambda results, _: np.exp(results) - 2.0,
        of_missing=math.log(2.0),
        least=-1.0,
    ),
    "nvidia": NumericTransform(
        "The rule of NVIDIA's code; arguments are clamped to at least 1.",
        lambda values, _: np.log(values + 3.0),
        lambda results, _: np.exp(results) - 3.0,
        least=-2.0,
    ),
    "standardize": NumericTransform(
        "Subtracts the mean and divides by the standard deviation of the training values.",
        lambda values, fitted: (values - fitted.mean) / fitted.deviation,
        lambda results, fitted: results * fitted.deviation + fitted.mean,
        needs_sums=True,
        tolerance=1 / 512,
        done=", standardized,",
        advice="most training rows are much closer together; choose the transform log or quantile, "
        "or drop the column or the row",
    ),
    "quantile": NumericTransform(
        "Interpolates between the edges of bins, which are fitted to the training values.",
        _share,
        _value_of_share,
        of_missing=0.5,
        bins=64,
    ),
    "none": NumericTransform(
        "Keeps numbers, which float16 must be able to represent.",
        lambda values, _: values,
        lambda results, _: results,
        checked_in_readers=True,
    ),
}
