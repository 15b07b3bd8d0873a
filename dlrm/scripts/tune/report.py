"""Results of a search: a table, JSON, a picture, and flags for `dlrm.scripts.main`."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.command_line import aligned, flags_of, text_of
from dlrm.files import write_atomically
from dlrm.manifest import sealed_json, sealed_lines
from dlrm.metrics.table import title as title_of
from dlrm.pages.pictures import BLUE, ORANGE, write_picture
from dlrm.scripts.tune.flags import JUDGES
from dlrm.scripts.tune.halving import Rung, Trial
from dlrm.train.reports.roles import CHOSEN, NEVER_CHOSEN

JSON, PNG, TABLE, FLAGS = "tuning.json", "tuning.png", "tuning.txt", "best.flags"
_COLUMNS = 3  # of panels
_ROLES = (
    f"metrics are of held-out training rows, {CHOSEN}; test and validation rows: {NEVER_CHOSEN}"
)


def table(trials: Sequence[Trial], rungs: Sequence[Rung], metric: str) -> list[str]:
    """Returns a table of trials, best first, and a line; deviations are over folds."""
    names = dict.fromkeys(name for trial in trials for name in trial.settings)
    varied = [n for n in names if len({repr(one.settings.get(n)) for one in trials}) > 1]
    metrics = [metric, *(name for name in JUDGES if name != metric)]
    heads = ["trial", "rung", "folds", "share", *metrics, *varied]
    rows = [
        [
            str(one.number),
            str(one.rung + 1),
            str(rungs[one.rung].folds),
            f"{rungs[one.rung].share:.3g}",
            *(_mean(one.values(name)) for name in metrics),
            *(
                text_of(one.settings[name]) if name in one.settings else "default"
                for name in varied
            ),
        ]
        for one in trials
    ]
    return [*aligned(heads, rows), _ROLES]


def _mean(values: Sequence[float]) -> str:
    if not np.isfinite(values).all():
        return "diverged"
    deviation = f" ± {np.std(values, ddof=1):.5f}" if len(values) > 1 else ""
    return f"{np.mean(values):.5f}{deviation}"


def write(
    directory: Path,
    trials: Sequence[Trial],
    rungs: Sequence[Rung],
    metric: str,
    best: Mapping[str, Any],
) -> str | None:
    """Writes the four files; returns the reason for having no picture, or None.

    Args:
        trials: all trials, the best first.
        best: all settings of a training with those of the best trial.
    """
    facts = {
        "metric": metric,
        "roles": {"chosen_on": "held_out", "never_chosen_on": ["test", "validation"]},
        "rungs": [rung._asdict() for rung in rungs],
        "trials": [
            {
                "trial": one.number,
                "settings": one.settings,
                "results": {str(rung + 1): folds for rung, folds in one.results.items()},
            }
            for one in trials
        ],
        "best": dict(best),
    }
    write_atomically(directory / TABLE, "\n".join(table(trials, rungs, metric)) + "\n")
    write_atomically(directory / JSON, sealed_json(facts))
    write_atomically(directory / FLAGS, sealed_lines("\n".join(flags_of(best)) + "\n"))
    problem = write_picture(directory / PNG, lambda figure: _draw(figure, trials, metric))
    return f"no picture: {problem}" if problem else None


def _draw(figure: Any, trials: Sequence[Trial], metric: str) -> None:
    """Draws the metric over the rungs, and on the first rung over each setting that varies."""
    from matplotlib.ticker import MaxNLocator

    shown = [one for one in trials if math.isfinite(one.mean(metric, 0))]
    names = dict.fromkeys(name for one in shown for name in one.settings)
    varied = [n for n in names if len({repr(one.settings.get(n)) for one in shown}) > 1]
    count = len(varied) + 1
    lines, columns = -(-count // _COLUMNS), min(count, _COLUMNS)
    figure.set_size_inches(4.2 * columns, 3.2 * lines)
    panels = list(figure.subplots(lines, columns, squeeze=False).flat)
    for one in reversed(shown):
        reached = range(one.rung + 1)
        best = one is trials[0]
        panels[0].plot(
            [number + 1 for number in reached],
            [one.mean(metric, number) for number in reached],
            "o-",
            color=ORANGE if best else BLUE,
            alpha=1 if best else 0.4,
        )
    panels[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    on_held_out = f"{title_of(metric)} of held-out rows ({CHOSEN})"
    panels[0].set(title="all trials; the best in orange", xlabel="rung", ylabel=on_held_out)
    for axis, name in zip(panels[1:], varied, strict=False):
        _draw_setting(axis, shown, name, metric, trials[0])
    for axis in panels:
        axis.grid(alpha=0.3)
        axis.set_visible(axis in panels[:count])


def _draw_setting(axis: Any, trials: Sequence[Trial], name: str, metric: str, best: Trial) -> None:
    chosen = [one for one in trials if name in one.settings]
    values = [one.settings[name] for one in chosen]
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    places: Sequence[Any] = values
    if not numbers or len(set(values)) <= 6:  # few values, evenly spaced
        order = sorted(set(values), key=None if numbers else str)
        places = [order.index(value) for value in values]
        axis.set_xticks(range(len(order)), [text_of(value) for value in order])
    elif min(values) > 0 and max(values) > 4 * min(values):
        axis.set_xscale("log")
    colors = [ORANGE if one is best else BLUE for one in chosen]
    axis.scatter(places, [one.mean(metric, 0) for one in chosen], c=colors, alpha=0.6)
    axis.set(title=f"first rung, --{name}", ylabel=title_of(metric))
