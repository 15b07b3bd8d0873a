"""Functions that watch a training, and metrics of their own, from the program that trains."""

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import iscoroutinefunction, isgeneratorfunction
from typing import Any

import numpy as np

from dlrm.metrics.table import METRICS

OnStep = Callable[[int, dict[str, float]], Any]
OwnMetrics = Mapping[str, Callable[[np.ndarray, np.ndarray], float]]
_TAKEN = {*METRICS, "step", "epoch", "lr"}  # by the entries of a run's history


@dataclass(frozen=True)
class Callbacks:
    """Functions that a trainer calls; each returns True to end the training; see `ends`.

    Attributes:
        on_step: called with the step, and `loss` and `lr`, where a line of progress is due.
        on_test: called with the step and the metrics of each test, after its checkpoint.
    """

    on_step: OnStep | None = None
    on_test: OnStep | None = None

    def __post_init__(self) -> None:
        for name in ("on_step", "on_test"):
            if not (getattr(self, name) is None or callable(getattr(self, name))):
                raise ValueError(f"{name}: expected a function, got {getattr(self, name)!r}")
            for kind in (isgeneratorfunction, iscoroutinefunction):
                if kind(getattr(self, name)):  # calling one would run none of it
                    raise ValueError(
                        f"{name}: expected a function that neither yields nor is async, got "
                        f"{getattr(self, name)!r}"
                    )


def ends(answer: Any) -> bool:
    """Returns whether a function asks to end the training: by True, also of NumPy or torch."""
    if getattr(answer, "ndim", None) == 0 and str(answer.dtype).endswith("bool"):
        return bool(answer)
    return answer is True


@dataclass(frozen=True)
class LabelsAndScores:
    """Metrics of a program's own, of labels and scores.

    Attributes:
        functions: name -> function of the labels, 0 or 1, and the probabilities, both `[rows]`.

    Raises:
        ValueError: a name is not a word, or another metric has it.
    """

    functions: OwnMetrics = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.functions, Mapping):
            raise ValueError(
                "metrics: expected a dict from names to functions of labels and scores, got "
                f"{self.functions!r}"
            )
        for name, function in self.functions.items():
            if not (isinstance(name, str) and name.isidentifier()) or name in _TAKEN:
                raise ValueError(
                    f"metrics: expected a name that is a word and not one of "
                    f"{', '.join(sorted(filter(str.isidentifier, _TAKEN)))}, got {name!r}"
                )
            if not callable(function):
                raise ValueError(f"metrics: {name!r}: expected a function, got {function!r}")

    def __call__(self, labels: np.ndarray, scores: np.ndarray) -> dict[str, float]:
        """Returns the metrics.

        Raises:
            ValueError: a function returns no number.
        """
        found: dict[str, float] = {}
        for name, function in self.functions.items():
            value: Any = function(labels, scores)
            if getattr(value, "ndim", None) == 0:  # as of torchmetrics
                value = value.item()
            if not isinstance(value, numbers.Real):
                raise ValueError(f"metrics: {name!r}: expected a number, got {value!r}")
            found[name] = float(value) if math.isfinite(value) else math.nan
        return found
