"""Pictures of a model by matplotlib: its training, and its scores of labeled rows."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dlrm.command_line import missing_extra
from dlrm.metrics.judged import ScoredRows
from dlrm.metrics.ranked import RankedRows
from dlrm.serving.shown import points, run_of
from dlrm.train.reports.curves import TEST, TRAINING

if TYPE_CHECKING:
    from dlrm.serving.predictor import Predictor

_WIDTH, _HEIGHT = 4.6, 3.8  # inches of a panel


def figure(model: "Predictor", rows: ScoredRows | None) -> Any:
    """Returns a figure of a model's training and, if there are rows, its scores; see `plot`."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(f"plot: {missing_extra(error, 'plots')}") from None
    panels: list[Callable[[Any], None]] = []
    if (run := run_of(model)) is not None and (run.curve or run.tests):
        tested = run.roles.chooses

        def losses(axis: Any) -> None:
            axis.plot(*points(run.curve, "loss"), color=TRAINING, label="training")
            axis.plot(*points(run.tests, "log_loss"), color=TEST, marker="o", label=tested)
            axis.set(title="Training", xlabel="step", ylabel="log loss")
            axis.legend()

        def aucs(axis: Any) -> None:
            axis.plot(*points(run.tests, "auc"), marker="o", color=TEST, label=tested)
            axis.set(title=f"AUC of the {tested} rows", xlabel="step", ylabel="AUC")

        panels += [losses, aucs]
    if rows is not None:
        ranked = RankedRows(rows.logits[0], rows.labels)
        panels += [lambda axis: _reliability(axis, ranked), lambda axis: _gain(axis, ranked)]
    if not panels:
        raise ValueError(f"plot: {model.path} does not describe its training; name labeled rows")
    columns = 2
    lines = len(panels) // columns
    drawn, axes = pyplot.subplots(
        lines, columns, figsize=(columns * _WIDTH, lines * _HEIGHT), layout="constrained"
    )
    pyplot.close(drawn)  # a notebook shows the figure that it gets, and would show an open one too
    for axis, panel in zip(axes.flat, panels, strict=True):
        panel(axis)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return drawn


def _reliability(axis: Any, ranked: RankedRows) -> None:
    curve = ranked.reliability()
    most = max(curve.predicted.max(), curve.observed.max()) * 1.05
    axis.plot([0, most], [0, most], linestyle="--", color="gray", label="perfect")
    axis.plot(curve.predicted, curve.observed, color=TEST, marker="o", label="model")
    axis.set(title="Calibration", xlabel="predicted click rate", ylabel="observed click rate")
    axis.legend()


def _gain(axis: Any, ranked: RankedRows) -> None:
    shares, gains = ranked.gains()
    axis.plot([0, 1], [0, 1], linestyle="--", color="gray", label="at random")
    axis.plot(shares, gains, color=TEST, label="model")
    axis.set(title="Gain", xlabel="share of the rows, highest scores first")
    axis.set_ylabel("share of the clicks")
    axis.legend()
