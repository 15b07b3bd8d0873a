"""The plot of a run: losses, learning rate and the test metric over its steps."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm.metrics.table import title as title_of
from dlrm.pages.pictures import BLUE, GRAY, ORANGE, write_picture
from dlrm.train.reports.roles import SELECTION

if TYPE_CHECKING:
    from dlrm.train.progress import Progress
    from dlrm.train.task import Task

TRAINING, TEST, _RATE = BLUE, ORANGE, GRAY
_POINTS_OF_SCHEDULE = 500


def draw_curves(
    progress: "Progress",
    task: "Task",
    path: Path,
    schedule: Callable[[int], float],
    title: str = "",
    tested: str = "test",
) -> str | None:
    """Draws losses, learning rate and the test metric over the steps of a run.

    Args:
        schedule: step, counted from 1 -> learning rate.
        title: names the run and its data.
        tested: name of the rows that are tested, and that choose the best step.

    Returns:
        None, or the reason why nothing was drawn: no matplotlib, no data, no place to write.
    """
    curve, first, last = progress.curve, progress.first_step, progress.step
    if not curve:
        return "no curves: the run took no step"
    tests = [entry for entry in progress.history if "lr" not in entry]
    best_step, metric = progress.best.get("step"), task.metric
    stride = max((last - first) // _POINTS_OF_SCHEDULE, 1)
    steps = (*range(first + 1, last, stride), last)
    rates = [{"step": step, "lr": schedule(step)} for step in steps]

    def draw(figure: Any) -> None:
        from matplotlib.ticker import MaxNLocator

        figure.set_size_inches(6, 7.5)
        axes = losses, rate, scores = figure.subplots(3, 1, sharex=True)
        _draw_line(losses, curve, "loss", TRAINING, "training")
        _draw_line(losses, tests, task.loss_metric, TEST, tested, best_step)
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
        margin = max((last - first) * 0.02, 0.5)
        scores.set_xlim(first + 1 - margin, last + margin)
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
