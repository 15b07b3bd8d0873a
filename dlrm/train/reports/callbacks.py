"""Functions of the program that trains: some watch the training, others are its own metrics."""

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
    """Functions that a trainer calls; each returns True, also of NumPy or torch, to end it.

    Attributes:
        on_step: called with the step, and `loss` and `lr`, where a line of progress is due.
        on_test: called with the step and the metrics of each test, after its checkpoint.
    """

    on_step: OnStep | None = None
    on_test: OnStep | None = None

    def __post_init__(self) -> None:
        for name in ("on_step", "on_test"):
            function, expected = getattr(self, name), "a function"
            if isgeneratorfunction(function) or iscoroutinefunction(function):
                expected += " that neither yields nor is async"  # calling one would run none of it
            elif function is None or callable(function):
                continue
            raise ValueError(f"{name}: expected {expected}, got {function!r}")


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
                taken = ", ".join(sorted(_TAKEN))
                raise ValueError(
                    f"metrics: expected a name that is a word and not one of {taken}, got {name!r}"
                )
            if not callable(function):
                raise ValueError(f"metrics: {name!r}: expected a function, got {function!r}")

    def __call__(self, labels: np.ndarray, scores: np.ndarray) -> dict[str, float]:
        """Returns the metrics; raises ValueError if a function returns no number."""
        found: dict[str, float] = {}
        for name, function in self.functions.items():
            value: Any = function(labels, scores)
            if getattr(value, "ndim", None) == 0:  # as of torchmetrics
                value = value.item()
            if not isinstance(value, numbers.Real):
                raise ValueError(f"metrics: {name!r}: expected a number, got {value!r}")
            found[name] = float(value) if math.isfinite(value) else math.nan
        return found
