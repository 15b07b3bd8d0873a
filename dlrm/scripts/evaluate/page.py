"""The results of an evaluation: as lines for a terminal, and as a self-contained page."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm.command_line import aligned
from dlrm.metrics.table import METRICS, TESTED, title
from dlrm.pages import Bar, Cell, Section, Tile, document, grid, note, table
from dlrm.pages.charts import ChartLine, chart

if TYPE_CHECKING:
    from markupsafe import Markup

Table = tuple[list[str], list[list[str]]]  # its heads and rows
Facts = dict[str, Any]
_TILES = ("auc", "log_loss", "calibration", "ece")
_IN_SLICES = [*TESTED, "ece"]  # metrics that tables of slices show
_CHANGED = ("log_loss", "normalized_entropy", "calibration", "ece")  # by a recalibration
_HALVES = "judged on the half it was not fitted to"


def lines_of(facts: Facts) -> list[str]:
    """Returns the lines: the metrics, then each table of slices, then notes."""
    counts = f"{facts['rows']:,} rows, {facts['clicks']:,} clicks"
    lines = [f"{facts['checkpoint']} on {_where(facts)}: {counts}", facts["intervals"]]
    if facts["against"]:
        lines.append(f"against {facts['against']}; differences are the first minus the second")
    for lead, (heads, rows) in _tables(facts):
        lines += ["", *lead, *aligned(heads, rows)]
    return lines + [""] * bool(facts["notes"]) + facts["notes"]


def _tables(facts: Facts) -> Iterator[tuple[list[str], Table]]:
    """Yields the tables for a terminal, each with the lines before it."""
    yield [], _metric_table(facts, "other")
    if after := facts.get("recalibration"):
        yield [f"recalibrated, {_HALVES}:"], _recalibration_table(facts)
    yield [], _decile_table(facts["curves"][0]["reliability"])
    if after:
        yield ["recalibrated:"], _decile_table(after["reliability"])
    for place in range(len(facts["slices"])):
        yield [], _slice_table(facts, place)
    if found := facts.get("importance"):
        sample = f"{facts['importance_rows']:,} of {facts['rows']:,} rows"
        lead = f"importance ({sample}): what is lost when a field's values are shuffled among rows"
        rows = [
            [one["field"], *_cells(one["auc_lost"], "+"), _number(one["log_loss_gained"], sign="+")]
            for one in found
        ]
        yield [lead], (["field", "AUC lost", "95 % interval", "log loss gained"], rows)


def page_of(facts: Facts) -> str:
    """Returns the page."""
    lead = [f"Rows: {_where(facts)}", *facts["notes"]]
    if facts["against"] is not None:
        lead.append(f"Compared with {facts['against']}; differences are this model minus that.")
    name = "/".join(Path(facts["checkpoint"]).parts[-3:])
    return document(f"Evaluation of {name}", lead, _tiles(facts), [*_sections(facts)])


def _sections(facts: Facts) -> Iterator[Section]:
    heads, rows = _metric_table(facts, "other model")
    for row, name in zip(rows, facts["models"][0], strict=True):
        row.append(f"{METRICS[name].meaning}; {METRICS[name].better}")
    metrics = table([("", [*heads, "meaning"])], rows, "Metrics with their intervals")
    yield Section("Metrics", [note(facts["intervals"] + "."), metrics])
    yield Section("Curves", [grid(_charts(facts))])
    if changed := facts["flags_changed"]:
        rows = [[f"--{n}", str(one), str(other)] for n, one, other in changed]
        flags = table([("", ["flag", "this model", "other model"])], rows, "Flags of the trainings")
        yield Section("Flags that differ", [flags], half=True)
    if facts.get("importance"):
        yield Section("Importance of fields", _importance(facts), half=True)
    if facts["fields"]:
        yield Section("Missing and unknown values", [_fields(facts)], half=True)
    yield Section("Deciles of the scores", _deciles(facts))
    for place, sliced in enumerate(facts["slices"]):
        yield Section(f"By {sliced['by']}", [_slices(facts, place)])


def _where(facts: Facts) -> str:
    """Returns the sources of the rows, with the split and its role in the model's training."""
    split = ", ".join(filter(None, (facts["split"], facts["role"])))
    return ", ".join(facts["sources"]) + (f" ({split})" if split else "")


def _metric_table(facts: Facts, other: str) -> Table:
    """Returns the metrics with their intervals, and how the models differ if there are two."""
    heads = ["metric", "value", "95 % interval"]
    if facts["against"] is not None:
        heads += [other, "difference", "95 % interval", "p"]
    rows = []
    for name in facts["models"][0]:
        first, *others = (model[name] for model in facts["models"])
        rows.append([title(name), *_cells(first)])
        if others:
            difference = facts["differences"][name]
            p = difference["p"]
            rows[-1].append(_number(others[0]["value"], decimals(first["low"], first["high"])))
            rows[-1] += _cells(difference, sign="+")
            rows[-1].append("< 0.001" if p is not None and p < 0.001 else _number(p, digits=3))
    return heads, rows


def _recalibration_table(facts: Facts) -> Table:
    before, after = facts["models"][0], facts["recalibration"]["judged"]
    rows = [[title(name), _interval(before[name]), _interval(after[name])] for name in _CHANGED]
    return ["metric", "before", "after"], rows


def _decile_table(reliability: dict[str, Any]) -> Table:
    """Returns predicted and observed rates, lowest first."""
    heads = ["decile of the scores", "rows", "predicted", "observed", "95 % interval", "gap"]
    names = ("weight", "predicted", "observed", "low", "high")
    rows: list[list[str]] = []
    for weight, predicted, observed, low, high in zip(*map(reliability.get, names), strict=True):
        rates = [_number(predicted), *_cells({"value": observed, "low": low, "high": high})]
        gap = _number(predicted - observed, sign="+")
        rows.append([str(len(rows) + 1), f"{weight:,.0f}", *rates, gap])
    return heads, rows


def _slice_table(facts: Facts, place: int) -> Table:
    """Returns the slices of a division, also recalibrated and compared if that was measured."""
    sliced, after = facts["slices"][place], facts.get("recalibration")
    compared = facts["against"] is not None
    heads = [sliced["by"], "rows", "clicks", *map(title, _IN_SLICES)]
    heads += ["recalibrated"] * bool(after) + ["AUC difference"] * compared
    rows = []
    for number, part in enumerate(sliced["slices"]):
        row = [part["name"], f"{part['rows']:,}", f"{part['clicks']:,}"]
        row += [_interval(part["models"][0][name]) for name in _IN_SLICES]
        if after:
            row.append(_interval(after["slices"][place]["slices"][number]["models"][0]["ece"]))
        if compared:
            row.append(_interval(part["differences"]["auc"], sign="+"))
        rows.append(row)
    return heads, rows


def _number(value: float | None, digits: int = 4, sign: str = "") -> str:
    """Returns a number, or a dash if a metric is undefined."""
    return "–" if value is None else f"{value:{sign}.{digits}f}"


def decimals(low: float | None, high: float | None) -> int:
    """Returns the digits after the point that an interval supports: 3 for a reach of 0.005.

    One digit of the reach is kept, or two if they are less than 36; without an interval 4 are kept.
    """
    if low is None or high is None or not 0 < high - low < math.inf:
        return 4
    return min(max(math.ceil(-math.log10((high - low) / 7.1)), 0), 6)


def _cells(interval: dict[str, float | None], sign: str = "") -> list[str]:
    """Returns a value and its bounds, with digits that follow the width of the interval."""
    digits = decimals(interval["low"], interval["high"])
    value, low, high = (_number(interval[k], digits, sign) for k in ("value", "low", "high"))
    return [value, "–" if interval["low"] is None else f"{low} to {high}"]


def _interval(interval: dict[str, float | None], sign: str = "") -> str:
    """Returns a value with its bounds in brackets."""
    value, bounds = _cells(interval, sign)
    return value if bounds == "–" else f"{value} [{bounds.replace(' to ', ', ')}]"


def _tiles(facts: Facts) -> list[Tile]:
    rows, clicks, first = facts["rows"], facts["clicks"], facts["models"][0]
    tiles = [
        Tile("rows", f"{rows:,}"),
        Tile("clicks", f"{clicks:,}", f"{100 * clicks / rows:.2f} % of the rows"),
    ]
    shown = [(title(name), _cells(first[name])) for name in _TILES]
    if facts["against"] is not None:
        shown.append(("AUC above the other model's", _cells(facts["differences"]["auc"], "+")))
    for name, (value, bounds) in shown:
        tiles.append(Tile(name, value, "" if bounds == "–" else bounds))
    return tiles


def _charts(facts: Facts) -> list["Markup"]:
    names = ["model"] if facts["against"] is None else ["this model", "other model"]
    curves = dict(zip(names, facts["curves"], strict=True))
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
        charts.append(chart("Gain", of_rows, "share of the clicks", lines, told, (0, 1, 0, 1)))
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
    return chart(
        "Reliability, and the number of rows by score",
        "predicted click rate",
        "observed click rate",
        lines,
        "Observed click rates of deciles of the scores beside the predicted ones.",
        (0, most_x * 1.02, 0, most_y * 1.04),
    )


def _lift(gains: Sequence[ChartLine], of_rows: str) -> "Markup":
    lines = []
    for line in gains:
        lift = [y / x for x, y in zip(line.x[1:], line.y[1:], strict=True)]
        lines.append(ChartLine(line.name, line.x[1:], lift))
    told = "; ".join(f"{line.name}: {line.y[0]:.2f} at the top 1 %" for line in lines)
    most = max(y for line in lines for y in line.y)
    lines.append(ChartLine("at random", [0, 1], [1, 1], dashed=True))
    return chart("Lift", of_rows, "lift", lines, told, (0, 1, 0, max(most, 1) * 1.05))


def _deciles(facts: Facts) -> list["Markup"]:
    """Returns the tables of deciles, and of what a recalibration changes."""
    heads, rows = _decile_table(facts["curves"][0]["reliability"])
    parts = [table([("", heads)], rows, "Predicted and observed click rates")]
    if after := facts.get("recalibration"):
        changed_heads, changed = _recalibration_table(facts)
        parts.append(table([("", changed_heads)], changed, f"Recalibrated, {_HALVES}"))
        parts.append(table([("", heads)], _decile_table(after["reliability"])[1], "Recalibrated"))
    return parts


def _slices(facts: Facts, place: int) -> "Markup":
    """Returns a table of slices with their AUC and its interval on a scale."""
    heads, rows = _slice_table(facts, place)
    aucs = [part["models"][0]["auc"] for part in facts["slices"][place]["slices"]]
    bars = _intervals(aucs, facts["models"][0]["auc"]["value"])
    auc = 3 + _IN_SLICES.index("auc")  # after name, rows and clicks
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
        begin, end = (place(value if one[key] is None else one[key]) for key in ("low", "high"))
        bars.append(Bar(_interval(one, sign), end, begin, place(value), marks))
    return bars


def _fields(facts: Facts) -> "Markup":
    """Returns a table of the fields with the most missing and unknown values."""
    fields = sorted(facts["fields"], key=lambda field: -(field[1] or 0) - field[2])
    shown = [(name, *shares) for name, *shares in fields if any(shares)]
    if not shown:
        return note("There are none.")
    heads = ["field", "missing", "without an id"]
    if all(missing is None for _, missing, _ in shown):  # datasets have only ids
        shown = [(name, unknown) for name, _, unknown in shown]
        heads = ["field", "missing or without an id"]
    rows = [
        [n, *(None if s is None else Bar(f"{100 * s:.2f} %", s) for s in of)] for n, *of in shown
    ]
    return table([("", heads)], rows, "Shares of the values of each field", full=True)


def _importance(facts: Facts) -> list["Markup"]:
    found = facts["importance"]
    bars = _intervals([one["auc_lost"] for one in found], 0.0, "+")
    rows = [
        [one["field"], bar, _number(one["log_loss_gained"], sign="+")]
        for one, bar in zip(found, bars, strict=True)
    ]
    told = note(
        "What the model loses when the values of a field are shuffled among rows, measured on "
        f"{facts['importance_rows']:,} rows."
    )
    heads = ["field", "AUC lost", "log loss gained"]
    return [told, table([("", heads)], rows, "Loss by field, with 95 % intervals", full=True)]
