"""A progress bar for programs and notebooks."""

import sys
import warnings
from types import TracebackType
from typing import Any

from tqdm import TqdmWarning

with warnings.catch_warnings():  # in a notebook without ipywidgets the bar is text
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm import auto

from dlrm.metrics.table import SHOWN, title
from dlrm.train.reports.callbacks import Callbacks, OnStep

_TEXT_SECONDS = 2.0  # between updates of text in a notebook, where each may be a line


def is_watched() -> bool:
    """Returns whether standard error is a terminal, or the program runs in a notebook."""
    return sys.stderr.isatty() or _is_notebook()


def _is_notebook() -> bool:
    return "ipykernel.zmqshell" in sys.modules


class ProgressBar:
    """A bar of training steps, with the last loss and the metrics of the last test."""

    def __init__(self, total: int, shown: bool) -> None:
        is_widget = "tqdm.notebook" in {kind.__module__ for kind in auto.tqdm.__mro__}
        is_text = _is_notebook() and not is_widget
        self._bar = auto.tqdm(
            total=total,
            desc="train",
            unit="step",
            disable=not shown,
            mininterval=_TEXT_SECONDS if is_text else 0.1,
        )
        self._figures: dict[str, str] = {}

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._bar.close()

    def move_to(self, step: int) -> None:
        """Moves the bar to a step."""
        self._bar.update(step - self._bar.n)

    def watching(self, callbacks: Callbacks) -> Callbacks:
        """Returns functions that show figures and then call the given ones."""
        if self._bar.disable:
            return callbacks
        return Callbacks(
            self._showing(callbacks.on_step, ["loss"]), self._showing(callbacks.on_test, SHOWN)
        )

    def _showing(self, function: OnStep | None, names: list[str]) -> OnStep:
        def called(step: int, values: dict[str, float]) -> Any:
            self._figures |= {title(n): f"{values[n]:.4f}" for n in names if n in values}
            self._bar.set_postfix(self._figures, refresh=False)
            return None if function is None else function(step, values)

        return called
