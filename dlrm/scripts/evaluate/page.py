"""The results of an evaluation as files: a self-contained page, and JSON."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm.documents import json_text
from dlrm.metrics.intervals import wilson
from dlrm.metrics.ranked import RankedRows
from dlrm.metrics.table import METRICS, title
from dlrm.pages import Bar, Cell, Section, Tile, document, grid, note, table
from dlrm.pages.charts import ChartLine, chart
from dlrm.scripts.evaluate.lines import (
    IN_SLICES,
    cells,
    decile_table,
    interval_text,
    metric_cells,
    number_text,
    recalibration_table,
    slice_table,
    where,
)

if TYPE_CHECKING:
    from markupsafe import Markup

HTML, JSON = "evaluation.html", "evaluation.json"
_TILES = ("auc", "log_loss", "calibration", "ece")


def curves_of(ranked: RankedRows) -> dict[str, Any]:
    """Returns the curves of a model's scores, as JSON values."""
    edges, counts = ranked.score_counts()
    shares, gains = ranked.gains()
    recall, precision = ranked.precision_recall()
    return {
        "reliability": reliability_of(ranked),
        "scores": _lists(edges=edges, rows=counts),
        "gain": _lists(rows=shares, clicks=gains),
        "precision_recall": _lists(recall=recall, precision=precision),
    }


def reliability_of(ranked: RankedRows) -> dict[str, Any]:
    """Returns predicted and observed click rates of each decile of the scores, as JSON values."""
    weight, predicted, observed, rows = ranked.reliability()
    low, high = wilson(observed, rows)
    return _lists(weight=weight, predicted=predicted, observed=observed, low=low, high=high)


def write_files(directory: Path, facts: dict[str, Any]) -> None:
    """Writes JSON and page."""
    (directory / JSON).write_text(json_text(facts, indent=1) + "\n", encoding="utf-8")
    (directory / HTML).write_text(page(facts), encoding="utf-8")


def page(facts: dict[str, Any]) -> str:
    """Returns the page."""
    lead = [f"Rows: {where(facts)}", *facts["notes"]]
    if facts["against"] is not None:
        lead.append(f"Compared with {facts['against']}; differences are this model minus that.")
    sections = [
        Section("Metrics", [note(facts["intervals"] + "."), _metrics(facts)]),
        Section("Curves", [grid(_charts(facts))]),
        *(
            [Section("Flags that differ", [_flags(facts)], half=True)]
            if facts["flags_changed"]
            else []
        ),
        *(_importance(facts) if facts.get("importance") else []),
        *(
            [Section("Missing and unknown values", _fields(facts), half=True)]
            * bool(facts["fields"])
        ),
        Section("Deciles of the scores", _deciles(facts)),
        *(
            Section(f"By {sliced['by']}", [_slices(place, facts)])
            for place, sliced in enumerate(facts["slices"])
        ),
    ]
    name = "/".join(Path(facts["checkpoint"]).parts[-3:])
    return document(f"Evaluation of {name}", lead, _tiles(facts), sections)


def _tiles(facts: dict[str, Any]) -> list[Tile]:
    rows, clicks = facts["rows"], facts["clicks"]
    first = facts["models"][0]
    tiles = [
        Tile("rows", f"{rows:,}"),
        Tile("clicks", f"{clicks:,}", f"{100 * clicks / rows:.2f} % of the rows"),
    ]
    for name in _TILES:
        value, bounds = cells(first[name])
        tiles.append(Tile(title(name), value, "" if bounds == "–" else bounds))
    if facts["against"] is not None:
        found = facts["differences"]["auc"]
        value, bounds = cells(found, "+")
        tiles.append(Tile("AUC above the other model's", value, "" if bounds == "–" else bounds))
    return tiles


def _metrics(facts: dict[str, Any]) -> "Markup":
    heads = ["metric", "value", "95 % interval"]
    if facts["against"] is not None:
        heads += ["other model", "difference", "95 % interval", "p"]
    rows = [
        [
            title(name),
            *metric_cells(facts, name),
            f"{METRICS[name].meaning}; {METRICS[name].better}",
        ]
        for name in facts["models"][0]
    ]
    return table([("", [*heads, "meaning"])], rows, "Metrics with their intervals")


def _flags(facts: dict[str, Any]) -> "Markup":
    rows = [[f"--{n}", str(one), str(other)] for n, one, other in facts["flags_changed"]]
    return table([("", ["flag", "this model", "other model"])], rows, "Flags of the trainings")


def _charts(facts: dict[str, Any]) -> list["Markup"]:
    compared = facts["against"] is not None
    curves = dict(zip(["this model", "other model"] if compared else ["model"], facts["curves"]))  # noqa: B905
    charts = [_reliability(curves)]
    gains = [
        ChartLine(name, one["gain"]["rows"], one["gain"]["clicks"])
        for name, one in curves.items()
        if None not in one["gain"]["clicks"]
    ]
    if gains:
        told = "; ".join(
            f"{line.name}: the top 10 % of the rows have {100 * line.y[10]:.1f} % of the clicks"
            for line in gains
        )
        lines = [*gains, ChartLine("at random", [0, 1], [0, 1], dashed=True)]
        of_rows = "share of the rows, highest scores first"
        limits = (0.0, 1.0, 0.0, 1.0)
        charts.append(chart("Gain", of_rows, "share of the clicks", lines, told, limits))
        charts.append(_lift(gains, of_rows))
    precision = [
        ChartLine(name, one["precision_recall"]["recall"], one["precision_recall"]["precision"])
        for name, one in curves.items()
    ]
    if any(line.x for line in precision):
        rate = facts["clicks"] / facts["rows"]
        told = f"Precision falls to the click rate, {rate:.4f}, as the recall rises."
        precision.append(ChartLine("at random", [0, 1], [rate, rate], dashed=True))
        charts.append(
            chart("Precision and recall", "recall", "precision", precision, told, (0, 1, 0, 1.02))
        )
    return charts


def _reliability(curves: dict[str, Any]) -> "Markup":
    """Returns observed rates with their intervals, over a histogram of the scores."""
    lines = []
    for name, one in curves.items():
        found, scores = one["reliability"], one["scores"]
        ends = [*zip(found["low"], found["high"], strict=True)]
        x, y = found["predicted"], found["observed"]
        lines.append(ChartLine(name, x, y, False, True, ends, scores["edges"], scores["rows"]))
    most_x = max([x for line in lines for x in (*line.x, *line.edges)], default=0.0) or 1.0
    most_y = max([high for line in lines for _, high in line.ends], default=0.0) or 1.0
    end = min(most_x, most_y)
    lines.append(ChartLine("perfect", [0, end], [0, end], dashed=True))
    limits = (0, most_x * 1.02, 0, most_y * 1.04)
    return chart(
        "Reliability, and the number of rows by score",
        "predicted click rate",
        "observed click rate",
        lines,
        "Observed click rates of deciles of the scores beside the predicted ones.",
        limits,
    )


def _lift(gains: Sequence[ChartLine], of_rows: str) -> "Markup":
    lines = [
        ChartLine(
            line.name, line.x[1:], [y / x for x, y in zip(line.x[1:], line.y[1:], strict=True)]
        )
        for line in gains
    ]
    told = "; ".join(f"{line.name}: {line.y[0]:.2f} at the top 1 %" for line in lines)
    most = max(y for line in lines for y in line.y)
    lines.append(ChartLine("at random", [0, 1], [1, 1], dashed=True))
    return chart("Lift", of_rows, "lift", lines, told, (0, 1, 0, max(most, 1) * 1.05))


def _deciles(facts: dict[str, Any]) -> list["Markup"]:
    """Returns the tables of deciles, and of what a recalibration changes."""
    heads, rows = decile_table(facts["curves"][0]["reliability"])
    parts = [table([("", heads)], rows, "Predicted and observed click rates")]
    if after := facts.get("recalibration"):
        told = "Recalibrated, judged on the half it was not fitted to"
        changed_heads, changed = recalibration_table(facts)
        parts.append(table([("", changed_heads)], changed, told))
        parts.append(table([("", heads)], decile_table(after["reliability"])[1], "Recalibrated"))
    return parts


def _slices(place: int, facts: dict[str, Any]) -> "Markup":
    """Returns a table of slices with their AUC and its interval on a scale."""
    sliced, after = facts["slices"][place], facts.get("recalibration")
    compared = facts["against"] is not None
    heads, rows = slice_table(sliced, compared, after and after["slices"][place])
    aucs = [part["models"][0]["auc"] for part in sliced["slices"]]
    bars = _intervals(aucs, facts["models"][0]["auc"]["value"])
    auc = 3 + IN_SLICES.index("auc")  # after name, rows and clicks
    shown = [[*row[:auc], bar, *row[auc + 1 :]] for row, bar in zip(rows, bars, strict=True)]
    caption = "With 95 % intervals; dashed: AUC of all rows"
    return table([("", heads)], shown, caption, full=True)


def _intervals(found: Sequence[dict[str, Any]], mark: float | None, sign: str = "") -> list[Cell]:
    """Returns cells of values with their intervals on one scale, with a line at `mark`."""
    known = [one[key] for one in found for key in one if key != "p" and one[key] is not None]
    known += [] if mark is None else [mark]
    low, high = min(known, default=0.0), max(known, default=1.0)

    def place(value: float) -> float:
        return (value - low) / ((high - low) or 1)

    marks = [] if mark is None else [place(mark)]
    bars: list[Cell] = []
    for one in found:
        value = one["value"]
        if value is None:
            bars.append(None)
            continue
        ends = [place(value if one[key] is None else one[key]) for key in ("low", "high")]
        bars.append(Bar(interval_text(one, sign), ends[1], ends[0], place(value), marks))
    return bars


def _fields(facts: dict[str, Any]) -> list["Markup"]:
    """Returns a table of the fields with the most missing and unknown values."""
    fields = sorted(facts["fields"], key=lambda field: -(field[1] or 0) - field[2])
    shown = [(name, *shares) for name, *shares in fields if any(shares)]
    heads = ["field", "missing", "without an id"]
    if all(missing is None for _, missing, _ in shown):  # datasets have only ids
        shown, heads = (
            [(name, unknown) for name, _, unknown in shown],
            ["field", "missing or without an id"],
        )
    rows = [
        [n, *(None if s is None else Bar(f"{100 * s:.2f} %", s) for s in of)] for n, *of in shown
    ]
    if not rows:
        return [note("There are none.")]
    return [table([("", heads)], rows, "Shares of the values of each field", full=True)]


def _importance(facts: dict[str, Any]) -> list[Section]:
    found = facts["importance"]
    bars = _intervals([one["auc_lost"] for one in found], 0.0, "+")
    rows = [
        [one["field"], bar, number_text(one["log_loss_gained"], sign="+")]
        for one, bar in zip(found, bars, strict=True)
    ]
    told = note(
        "What the model loses when the values of a field are shuffled among rows, measured on "
        f"{facts['importance_rows']:,} rows."
    )
    heads = ["field", "AUC lost", "log loss gained"]
    caption = "Loss by field, with 95 % intervals"
    parts = [told, table([("", heads)], rows, caption, full=True)]
    return [Section("Importance of fields", parts, half=True)]


def _lists(**curve: Any) -> dict[str, list[float | None]]:
    return {
        name: [round(float(v), 8) if math.isfinite(v) else None for v in values]
        for name, values in curve.items()
    }
