"""The days of a chain as a table of text, and as a self-contained page."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dlrm.command_line import aligned
from dlrm.metrics.table import METRICS, title
from dlrm.pages import Cell, Section, Tile, document, grid, note, table
from dlrm.pages.charts import ChartLine, chart
from dlrm.scripts.daily.chain import LearnedDay
from dlrm.scripts.daily.flags import CONTINUED, FROZEN, RETRAINED

if TYPE_CHECKING:
    from markupsafe import Markup

_MODELS = {
    CONTINUED: "continued model",
    RETRAINED: "model retrained on all days before",
    FROZEN: "model of the first day",
}
_SHOWN = ("auc", "log_loss", "calibration", "gauc_by_impressions")
_MOST_LINES = 31  # days of the table of text
_MOST_FIELDS = 20


def table_of(days: Sequence[LearnedDay]) -> list[str]:
    """Returns a table of the last days: of each its metrics before it was learned."""
    shown = days[-_MOST_LINES:]
    models = _models(shown)
    others = [model for model in models if model != CONTINUED]
    heads = ["day", "rows", "clicks", *(title(n) for n in _SHOWN if _has(shown, n))]
    heads += [f"AUC {model}" for model in others] + ["alarms"]
    rows = []
    for day in shown:
        own = day.judged.get(CONTINUED, {})
        cells = [_text(own.get(name)) for name in _SHOWN if _has(shown, name)]
        cells += [_text(day.judged.get(model, {}).get("auc")) for model in others]
        rows.append([day.name, f"{day.rows:,}", f"{day.clicks:,}", *cells, str(len(day.alarms))])
    return aligned(heads, rows)


def page(days: Sequence[LearnedDay]) -> str:
    """Returns the page."""
    last = days[-1]
    lead = [
        f"{len(days)} days, {days[0].name} to {last.name}. Each day was scored before it was "
        "learned, so no model has seen the rows that it is judged on."
    ]
    sections = [
        Section("Metrics by day", [grid(_charts(days)), _metrics(days)]),
        Section("Alarms", [_alarms(days)]),
        *([Section(f"Fields on {last.name}", [_fields(last)])] if last.fields else []),
    ]
    return document("Learned day by day", lead, _tiles(days), sections)


def _tiles(days: Sequence[LearnedDay]) -> list[Tile]:
    last = days[-1]
    tiles = [Tile("days", str(len(days))), Tile("rows", f"{sum(day.rows for day in days):,}")]
    for name in _SHOWN:
        if (value := last.judged.get(CONTINUED, {}).get(name)) is not None:
            tiles.append(Tile(title(name), f"{value:.4f}", f"on {last.name}"))
    return [*tiles, Tile("alarms", str(len(last.alarms)), f"on {last.name}")]


def _charts(days: Sequence[LearnedDay]) -> list["Markup"]:
    charts = []
    for name in _SHOWN:
        if not _has(days, name):
            continue
        lines, told = [], []
        for model in _models(days):
            points = [
                (number, value)
                for number, day in enumerate(days)
                if (value := day.judged.get(model, {}).get(name)) is not None
            ]
            if points:
                x, y = zip(*points, strict=True)
                lines.append(ChartLine(_MODELS[model], x, y, dots=True))
                told.append(f"{_MODELS[model]}: {y[0]:.4f} at first, {y[-1]:.4f} at last")
        if name == "calibration":
            lines.append(ChartLine("right", [1, len(days) - 1], [1, 1], dashed=True))
        meaning = METRICS[name].better if name in METRICS else ""
        caption = f"{title(name)} by day ({meaning})"
        charts.append(chart(caption, "day of the chain", title(name), lines, "; ".join(told)))
    return charts


def _metrics(days: Sequence[LearnedDay]) -> "Markup":
    models, names = _models(days), [name for name in _SHOWN if _has(days, name)]
    head = [("", ["day", "rows", "click rate"])]
    head += [(_MODELS[model], [title(name) for name in names]) for model in models]
    rows: list[list[Cell]] = []
    for day in days:
        rate = f"{day.clicks / day.rows:.4f}" if day.rows else None
        cells = [_cell(day.judged.get(model, {}).get(n)) for model in models for n in names]
        rows.append([day.name, f"{day.rows:,}", rate, *cells])
    return table(head, rows, "Metrics of each day before it was learned", full=True)


def _alarms(days: Sequence[LearnedDay]) -> "Markup":
    rows = [[day.name, alarm] for day in reversed(days) for alarm in day.alarms]
    return table([("", ["day", "alarm"])], rows, "Alarms") if rows else note("No alarm.")


def _fields(day: LearnedDay) -> "Markup":
    ordered = sorted(day.fields.items(), key=lambda item: -item[1].get("psi", 0.0))
    rows = [
        [name, *(_cell(own.get(key)) for key in ("psi", "unknown", "missing"))]
        for name, own in ordered[:_MOST_FIELDS]
    ]
    heads = ["field", "PSI against the day before", "unknown values", "missing values"]
    return table([("", heads)], rows, "Fields that changed most")


def _models(days: Sequence[LearnedDay]) -> list[str]:
    return [model for model in _MODELS if any(model in day.judged for day in days)]


def _has(days: Sequence[LearnedDay], name: str) -> bool:
    return any(own.get(name) is not None for day in days for own in day.judged.values())


def _cell(value: float | None) -> str | None:
    return None if value is None or not math.isfinite(value) else f"{value:.4f}"


def _text(value: float | None) -> str:
    return _cell(value) or "-"
