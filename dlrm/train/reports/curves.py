"""The plot of a run: losses, learning rate and the test metric over its steps."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlrm.metrics.table import title as title_of
from dlrm.pages.pictures import BLUE, GRAY, ORANGE, write_picture
from dlrm.train.reports.roles import CHOSEN

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
        metric: name of the test metric, such as "auc".
        loss_metric: name of the test loss, such as "log_loss".
        title: names the run and its data.
        schedule: step, counted from 1 -> learning rate.
        tested: name of the rows that are tested, and that choose the best step.
        first_step: last step of the run that this one continues.

    Returns:
        None, or the reason why nothing was drawn: no matplotlib, no data, no place to write.
    """
    if not curve and not history:
        return "no curves: the run took no step"
    trained = curve or [entry for entry in history if "lr" in entry]
    tests = [entry for entry in history if "lr" not in entry]
    steps = [int(entry["step"]) for entry in (*trained, *tests)]
    rates = _rates(schedule, range(first_step + 1, max(steps) + 1), history)
    panels: list[tuple[str, list[tuple[str, str, Entries, str]]]] = [
        ("loss", [("training", TRAINING, trained, "loss"), (tested, TEST, tests, loss_metric)]),
        ("learning rate", [("", _RATE, rates, "lr")]),
        (f"{tested} {title_of(metric)} ({CHOSEN})", [("", TEST, tests, metric)]),
    ]

    def draw(figure: Any) -> None:
        from matplotlib.ticker import MaxNLocator

        figure.set_size_inches(6, 7.5)
        axes = figure.subplots(3, 1, sharex=True)
        for axis, (label, lines) in zip(axes, panels, strict=True):
            _draw_panel(axis, lines, best_step)
            axis.set_ylabel(label)
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
            axis.ticklabel_format(axis="y", useOffset=False)
        axes[1].set_ylim(bottom=0)
        axes[-1].set_xlabel("step")
        axes[-1].xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if best := next((entry for entry in tests if best_step == entry["step"]), None):
            value = f", {title_of(metric)} {best[metric]:.4f}" if metric in best else ""
            axes[-1].set_title(f"best: step {best_step:.0f}{value}", loc="left", fontsize=10)
        margin = max((max(steps) - first_step) * 0.02, 0.5)
        axes[-1].set_xlim(first_step + 1 - margin, max(steps) + margin)
        figure.suptitle(title, fontsize=11, wrap=True)
        figure.align_ylabels()

    problem = write_picture(path, draw)
    return f"no curves: {problem}" if problem else None


def _rates(
    schedule: Callable[[int], float] | None, steps: range, history: Entries
) -> list[Mapping[str, float]]:
    """Returns the learning rate of steps that are close enough to show the schedule."""
    if schedule is None:
        return [entry for entry in history if "lr" in entry]
    stride = max(len(steps) // _POINTS_OF_SCHEDULE, 1)
    shown = sorted({*steps[::stride], *steps[-1:]})
    return [{"step": step, "lr": schedule(step)} for step in shown]


def _draw_panel(
    axis: Any, lines: Sequence[tuple[str, str, Entries, str]], best_step: float | None
) -> None:
    """Draws lines, each given by label, color, entries, and the value to plot."""
    drawn = [line for line in lines if any(line[3] in entry for entry in line[2])]
    for label, color, entries, name in drawn:
        points = [(entry["step"], entry[name]) for entry in entries if name in entry]
        marker = "o" if len(points) < 60 and name != "lr" else ""
        size = 6 if len(points) < 20 else 3
        x, y = zip(*points, strict=True)
        axis.plot(x, y, marker=marker, markersize=size, color=color, label=label)
        if name != "lr" and color == TEST and best_step in x:
            best = y[x.index(best_step)]
            axis.plot([best_step], [best], "*", markersize=13, color=color, label="best")
    if best_step is not None:
        axis.axvline(best_step, color=TEST, linestyle=":", linewidth=1)
    if not drawn:
        axis.text(0.5, 0.5, "none yet", ha="center", va="center", transform=axis.transAxes)
    if any(line[0] for line in drawn):
        axis.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False
        )  # above the lines
