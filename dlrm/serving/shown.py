"""A model as text, as HTML and as a figure: its fields, its training, its scores of rows."""

import html
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dlrm.command_line import missing_extra
from dlrm.data.schema.schema import Schema
from dlrm.metrics.judged import ScoredRows
from dlrm.metrics.ranked import RankedRows
from dlrm.metrics.table import METRICS, SHOWN, title
from dlrm.pages import table
from dlrm.remote.uri import shown
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.runs import read_run
from dlrm.train.reports.curves import TEST, TRAINING
from dlrm.train.reports.roles import HOLDOUT, SELECTION

if TYPE_CHECKING:
    from dlrm.serving.predictor import Predictor

_MOST_NAMES = 12
_WIDTH, _HEIGHT = 4.6, 3.8  # inches of a panel


def summary_of(model: "Predictor") -> list[str]:
    """Returns the number of fields and rows, and the metrics of the hold-out rows."""
    parts, found = [f"{_size(model)}"], _tested(model)
    if found:
        (name, role), metrics = next(iter(found.items()))
        if {"auc", "log_loss"} <= metrics.keys():
            auc, loss = metrics["auc"], metrics["log_loss"]
            parts.append(f"{name} auc {auc:.4f}, log loss {loss:.4f} ({role})")
    return parts


def lines_of(model: "Predictor") -> list[str]:
    """Returns lines for `print`: size, columns by role, draft, metrics, and the checkpoint."""
    lines = [f"DLRM of {_size(model)}", *(f"{name}: {text}" for name, text in _columns(model))]
    if model.draft is not None and (note := model.draft.note()):
        lines.append(f"draft: {note}")
    for (name, role), metrics in _tested(model).items():
        own = [n for n in metrics if n in SHOWN or n not in METRICS]
        values = ", ".join(f"{title(n)} {metrics[n]:.4f}" for n in own)
        lines.append(f"{name} ({role}): {values}")
    return [*lines, f"checkpoint: {shown(str(model.path))}"]


def html_of(model: "Predictor") -> str:
    """Returns the size, a table of metrics, and one of columns, for a notebook."""
    parts = [f"<p>DLRM of {html.escape(_size(model))}</p>"]
    if found := _tested(model):
        heads = ["metric", *(f"{name} ({role})" for name, role in found)]
        names = dict.fromkeys(name for metrics in found.values() for name in metrics)
        rows = [
            [title(n), *(f"{m[n]:.4f}" if n in m else None for m in found.values())] for n in names
        ]
        parts.append(table([("", heads)], rows, "metrics of the training"))
    columns = [*_columns(model), ("checkpoint", shown(str(model.path)))]
    return "".join([*parts, table([("", ["role", "columns"])], columns, "columns of the rows")])


def figure_of(model: "Predictor", rows: ScoredRows | None) -> Any:
    """Returns a figure of a model's training and, if there are rows, its scores; see `plot`."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(f"plot: {missing_extra(error, 'plots')}") from None
    panels = _training(model)
    if rows is not None:
        curves = RankedRows(rows.logits[0], rows.labels).curves()
        panels += [partial(_reliability, **curves["reliability"]), partial(_gain, **curves["gain"])]
    if not panels:
        raise ValueError(f"plot: {model.path} does not describe its training; name labeled rows")
    lines = len(panels) // 2
    drawn, axes = pyplot.subplots(
        lines, 2, figsize=(2 * _WIDTH, lines * _HEIGHT), layout="constrained"
    )
    pyplot.close(drawn)  # a notebook shows the figure that it gets, and would show an open one too
    for axis, panel in zip(axes.flat, panels, strict=True):
        panel(axis)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return drawn


def _training(model: "Predictor") -> list[Callable[[Any], None]]:
    """Returns the panels of the training; none if the checkpoint is gone or has no curve."""
    try:
        run = read_run(model.path)
    except (OSError, ValueError, KeyError, TypeError):
        return []
    if not run.curve and not run.tests:
        return []
    tested = run.roles.chooses

    def losses(axis: Any) -> None:
        axis.plot(*_points(run.curve, "loss"), color=TRAINING, label="training")
        axis.plot(*_points(run.tests, "log_loss"), color=TEST, marker="o", label=tested)
        axis.set(title="Training", xlabel="step", ylabel="log loss")
        axis.legend()

    def aucs(axis: Any) -> None:
        axis.plot(*_points(run.tests, "auc"), marker="o", color=TEST, label=tested)
        axis.set(title=f"AUC of the {tested} rows", xlabel="step", ylabel="AUC")

    return [losses, aucs]


def _points(entries: Sequence[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    """Returns steps and values of the entries of a run that have a value of this name."""
    known = [(one["step"], one[name]) for one in entries if one.get(name) == one.get(name, 1)]
    return [step for step, _ in known], [value for _, value in known]


def _reliability(axis: Any, predicted: Any, observed: Any, **others: Any) -> None:
    most = max(predicted.max(), observed.max()) * 1.05
    axis.plot([0, most], [0, most], linestyle="--", color="gray", label="perfect")
    axis.plot(predicted, observed, color=TEST, marker="o", label="model")
    axis.set(title="Calibration", xlabel="predicted click rate", ylabel="observed click rate")
    axis.legend()


def _gain(axis: Any, rows: Any, clicks: Any) -> None:
    axis.plot([0, 1], [0, 1], linestyle="--", color="gray", label="at random")
    axis.plot(rows, clicks, color=TEST, label="model")
    axis.set(title="Gain", xlabel="share of the rows, highest scores first")
    axis.set_ylabel("share of the clicks")
    axis.legend()


def _size(model: "Predictor") -> str:
    config = model.model.config
    kinds = f"{config.num_numerical_features} numerical and {len(config.table_sizes)}"
    fields = f"{kinds} categorical fields"
    try:
        rows = int(Checkpoint(model.path).config["dataset"]["rows"])
    except (OSError, ValueError, KeyError, TypeError):
        return fields
    return f"{fields}, trained on {rows:,} rows"


def _columns(model: "Predictor") -> list[tuple[str, str]]:
    """Returns the names of columns by their role in the schema."""
    if model.transform is None:
        return []
    schema = model.transform.schema
    label = schema.label.column
    if schema.label.positives:
        label += f" ({' or '.join(schema.label.positives)} is 1)"
    by_role: dict[str, Any] = {
        "label": [label],
        "numerical": [_told(schema, name) for name in schema.numerical_names],
        "categorical": schema.categorical_names,
        "weight": [schema.weight] if schema.weight else [],
        "groups": schema.groups,
        "time": [schema.time.column] if schema.time else [],
    }
    return [(role, _listed(names)) for role, names in by_role.items() if names]


def _told(schema: Schema, name: str) -> str:
    """Returns the name of a number, with its column if that is an id as well."""
    column = name.removesuffix("_number")
    both = column != name and column in schema.categorical_names
    return f"{name} (of {column})" if both else name


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _tested(model: "Predictor") -> dict[tuple[str, str], dict[str, float]]:
    """Returns metrics by the name of the rows and their role, those of hold-out rows first."""
    results = model.results
    found: dict[tuple[str, str], dict[str, float]] = {}
    for key, role in {"holdout_split": HOLDOUT, "selection_split": SELECTION}.items():
        name = results.get(key)
        metrics = {
            key.removeprefix(f"{name}_"): value
            for key, value in results.items()
            if key.startswith(f"{name}_") and isinstance(value, int | float)
        }
        if name is not None and metrics:
            found[name, role] = metrics
    return found
