"""The plot of a run: losses, learning rate and the test metric over its steps."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlrm.metrics.table import title as title_of
from dlrm.pages.pictures import BLUE, GRAY, ORANGE, write_picture
from dlrm.train.reports.roles import SELECTION

TRAINING, TEST, _RATE = BLUE, ORANGE, GRAY
_POINTS_OF_SCHEDULE = 500

Entries = Sequence[Mapping[str, float]]


def draw_curves(
    curve: Entries,
    history: Entries,
    metric: str,
    loss_metric: str,
    path: Path,
    *,
    title: str = "",
    schedule: Callable[[int], float] | None = None,
    best_step: float | None = None,
    tested: str = "test",
    first_step: int = 0,
) -> str | None:
    """Draws losses, learning rate and the test metric over the steps of a run.

    Args:
        curve: entries with `step` and the training `loss` of the steps up to it.
        history: entries with `step`, `loss` and `lr`, which are drawn if there is no curve, or with
            `step` and a test's metrics.
        metric, loss_metric: names of the test metric and of the test loss, such as "auc".
        title: names the run and its data.
        schedule: step, counted from 1 -> learning rate; None draws the rates of the history.
        tested: name of the rows that are tested, and that choose the best step.
        first_step: last step of the run that this one continues.

    Returns:
        None, or the reason why nothing was drawn: no matplotlib, no data, no place to write.
    """
    if not curve and not history:
        return "no curves: the run took no step"
    rates = [entry for entry in history if "lr" in entry]
    tests = [entry for entry in history if "lr" not in entry]
    trained = curve or rates
    last = max(int(entry["step"]) for entry in (*trained, *tests))
    if schedule is not None:
        stride = max((last - first_step) // _POINTS_OF_SCHEDULE, 1)
        steps = (*range(first_step + 1, last, stride), last)
        rates = [{"step": step, "lr": schedule(step)} for step in steps]

    def draw(figure: Any) -> None:
        from matplotlib.ticker import MaxNLocator

        figure.set_size_inches(6, 7.5)
        axes = losses, rate, scores = figure.subplots(3, 1, sharex=True)
        _draw_line(losses, trained, "loss", TRAINING, "training")
        _draw_line(losses, tests, loss_metric, TEST, tested, best_step)
        _draw_line(rate, rates, "lr", _RATE)
        _draw_line(scores, tests, metric, TEST, best_step=best_step)
        labels = "loss", "learning rate", f"{tested} {title_of(metric)} ({SELECTION})"
        for axis, label in zip(axes, labels, strict=True):
            axis.set_ylabel(label)
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
            axis.ticklabel_format(axis="y", useOffset=False)
            if not axis.has_data():
                axis.text(0.5, 0.5, "none yet", ha="center", va="center", transform=axis.transAxes)
            if best_step is not None:
                axis.axvline(best_step, color=TEST, linestyle=":", linewidth=1)
        losses.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False)  # above them
        rate.set_ylim(bottom=0)
        scores.set_xlabel("step")
        scores.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if best := next((entry for entry in tests if best_step == entry["step"]), None):
            value = f", {title_of(metric)} {best[metric]:.4f}" if metric in best else ""
            scores.set_title(f"best: step {best_step:.0f}{value}", loc="left", fontsize=10)
        margin = max((last - first_step) * 0.02, 0.5)
        scores.set_xlim(first_step + 1 - margin, last + margin)
        figure.suptitle(title, fontsize=11, wrap=True)
        figure.align_ylabels()

    problem = write_picture(path, draw)
    return f"no curves: {problem}" if problem else None


def _draw_line(
    axis: Any,
    entries: Iterable[Mapping[str, float]],
    name: str,
    color: str,
    label: str = "",
    best_step: float | None = None,
) -> None:
    """Draws a value of entries, if some have it, and a star at the best step."""
    points = {entry["step"]: entry[name] for entry in entries if name in entry}
    if not points:
        return
    marker = "o" if len(points) < 60 and name != "lr" else ""
    size = 6 if len(points) < 20 else 3
    style = {"marker": marker, "markersize": size, "color": color, "label": label}
    axis.plot([*points], [*points.values()], **style)
    if best_step in points:
        axis.plot([best_step], [points[best_step]], "*", markersize=13, color=color, label="best")
