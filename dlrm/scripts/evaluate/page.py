"""The results of an evaluation as files: a self-contained page, and JSON."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlrm.metrics.ranked import RankedRows
from dlrm.metrics.table import METRICS, SHOWN, legend
from dlrm.pages import Line, chart, document, side_bars, table, whiskers
from dlrm.scripts.evaluate.lines import metric_table, slice_table, where

HTML, JSON = "evaluation.html", "evaluation.json"
_MOST_BARS = 40
_LONGEST = 24  # maximum characters of a slice's name beside a chart


def curves_of(ranked: RankedRows) -> dict[str, Any]:
    """Returns the curves of a model's scores, as JSON values."""
    weight, predicted, observed = ranked.reliability()
    shares, gains = ranked.gains()
    recall, precision = ranked.precision_recall()
    return {
        "reliability": {"weight": _list(weight), "predicted": _list(predicted)}
        | {"observed": _list(observed)},
        "gain": {"rows": _list(shares), "clicks": _list(gains)},
        "precision_recall": {"recall": _list(recall), "precision": _list(precision)},
    }


def write_files(directory: Path, facts: dict[str, Any]) -> None:
    """Writes JSON and page."""
    (directory / JSON).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    (directory / HTML).write_text(page(facts), encoding="utf-8")


def page(facts: dict[str, Any]) -> str:
    """Returns the page."""
    compared = facts["against"] is not None
    names = [facts["checkpoint"], *([facts["against"]] if compared else [])]
    parts = [_paragraph(f"Rows: {where(facts)}"), _paragraph(_summary(facts))]
    parts += [_paragraph(note) for note in facts["notes"]]
    if compared:
        parts.append(_paragraph(f"Compared with {names[1]}. " + _verdict(facts)))
    parts += ["<h2>Metrics</h2>", _note(facts["intervals"] + ".")]
    heads, rows = metric_table(facts)
    parts.append(table([("", heads)], rows, "metrics with their intervals"))
    parts.append("<details><summary>What the metrics mean</summary><dl>")
    meanings = legend(facts["models"][0]).items()
    parts += [f"<dt>{name}</dt><dd>{text}</dd>" for name, text in meanings]
    parts.append("</dl></details>")
    parts += ["<h2>Curves</h2>", *_charts(facts, compared)]
    if facts["flags_changed"]:
        rows = [[f"--{n}", str(one), str(other)] for n, one, other in facts["flags_changed"]]
        parts += ["<h2>Flags that differ</h2>"]
        parts.append(table([("", ["flag", "this model", "the other"])], rows, "flags that differ"))
    if facts["fields"]:
        parts += _fields(facts)
    for sliced in facts["slices"]:
        parts.append(f"<h2>By {_escaped(sliced['by'])}</h2>")
        parts.append(_slice_chart(sliced))
        heads, rows = slice_table(sliced, compared)
        parts.append(table([("", heads)], rows, f"metrics by {sliced['by']}"))
    if facts.get("importance"):
        parts += _importance(facts["importance"], facts["importance_rows"])
    return document("Evaluation of " + "/".join(Path(names[0]).parts[-3:]), parts)


def _summary(facts: dict[str, Any]) -> str:
    first = facts["models"][0]
    parts = [f"{facts['rows']:,} rows, {facts['clicks']:,} of them clicked"]
    for name in SHOWN:
        if first[name]["value"] is not None:
            parts.append(f"{METRICS[name].title} {first[name]['value']:.4f}")
    return "; ".join(parts) + "."


def _verdict(facts: dict[str, Any]) -> str:
    """Describes the difference of the models in AUC."""
    found = facts["differences"]["auc"]
    if found["value"] is None or found["p"] is None:
        return "Their AUC cannot be compared."
    direction = "higher" if found["value"] > 0 else "lower"
    sure = "beyond chance" if found["p"] < 0.05 else "within what chance explains"
    return f"The AUC is {abs(found['value']):.4f} {direction}, {sure} (p {found['p']:.3g})."


def _charts(facts: dict[str, Any], compared: bool) -> list[str]:
    labels = ["this model", "the other"] if compared else ["model"]
    curves = facts["curves"]
    reliability = [
        Line(name, one["reliability"]["predicted"], one["reliability"]["observed"], dots=True)
        for name, one in zip(labels, curves, strict=True)
    ]
    most = max([v for line in reliability for v in (*line.x, *line.y)], default=1.0) * 1.05
    gains = [
        Line(name, one["gain"]["rows"], one["gain"]["clicks"])
        for name, one in zip(labels, curves, strict=True)
        if None not in one["gain"]["clicks"]
    ]
    precision = [
        Line(name, one["precision_recall"]["recall"], one["precision_recall"]["precision"])
        for name, one in zip(labels, curves, strict=True)
    ]
    charts = [
        chart(
            "Reliability",
            "predicted click rate",
            "observed click rate",
            [*reliability, Line("perfect", [0, most], [0, most], dashed=True)],
            _told_reliability(facts),
            (0, most, 0, most),
        )
    ]
    if gains:
        told = "; ".join(
            f"{name}: the top 10 % of the rows have {100 * line.y[10]:.1f} % of the clicks"
            for name, line in zip(labels, gains, strict=True)
        )
        charts.append(
            chart(
                "Gain",
                "share of the rows, highest scores first",
                "share of the clicks",
                [*gains, Line("at random", [0, 1], [0, 1], dashed=True)],
                told,
                (0, 1, 0, 1),
            )
        )
        charts.append(_lift_chart(gains))
    if any(line.x for line in precision):
        told = "Precision falls as the recall rises."
        charts.append(
            chart("Precision and recall", "recall", "precision", precision, told, (0, 1, 0, 1.02))
        )
    return charts


def _lift_chart(gains: Sequence[Line]) -> str:
    lines = [
        Line(line.name, line.x[1:], [y / x for x, y in zip(line.x[1:], line.y[1:], strict=True)])
        for line in gains
    ]
    told = "; ".join(f"{line.name}: {line.y[0]:.2f} at the top 1 %" for line in lines)
    return chart("Lift", "share of the rows, highest scores first", "lift", lines, told)


def _told_reliability(facts: dict[str, Any]) -> str:
    first = facts["models"][0]
    ratio, error = first["calibration"]["value"], first["ece"]["value"]
    if ratio is None or error is None:
        return "There are no clicks to compare with."
    return f"Predicted over observed clicks: {ratio:.3f}; expected calibration error {error:.4f}."


def _slice_chart(sliced: dict[str, Any]) -> str:
    """Returns a chart of each slice's AUC, if defined, with its interval."""
    aucs = [(part["name"], part["models"][0]["auc"]) for part in sliced["slices"]]
    known = [(name, auc) for name, auc in aucs if auc["value"] is not None]
    if len(known) < 2:
        return ""
    names = [name if len(name) <= _LONGEST else "…" + name[1 - _LONGEST :] for name, _ in known]
    intervals = [(auc["value"], auc["low"], auc["high"]) for _, auc in known]
    return whiskers("AUC and its interval", names, intervals)


def _fields(facts: dict[str, Any]) -> list[str]:
    """Returns a table of the fields with the most missing and unknown values."""
    fields = sorted(facts["fields"], key=lambda field: -(field[1] or 0) - field[2])
    shown = [(name, *shares) for name, *shares in fields if any(shares)]
    heads = ["field", "missing", "without an id"]
    if all(missing is None for _, missing, _ in shown):  # datasets have only ids
        shown, heads = (
            [(name, unknown) for name, _, unknown in shown],
            ["field", "missing or without an id"],
        )
    rows = [[n, *(None if s is None else f"{100 * s:.2f} %" for s in of)] for n, *of in shown]
    parts = ["<h2>Values that are missing or have no id</h2>"]
    if not rows:
        return [*parts, _paragraph("There are none.")]
    return [*parts, table([("", heads)], rows, "shares of values")]


def _importance(found: list[dict[str, Any]], rows_scored: int) -> list[str]:
    shown = found[:_MOST_BARS]
    rows = [
        [one["field"], *(_signed(one["auc_lost"][k]) for k in ("value", "low", "high"))]
        + [_signed(one["log_loss_gained"])]
        for one in found
    ]
    head = ["field", "AUC lost", "low", "high", "log loss gained"]
    return [
        "<h2>Importance of fields</h2>",
        _note(
            "What the model loses when the values of a field are shuffled among rows, measured on "
            f"{rows_scored:,} rows."
        ),
        side_bars(
            "AUC lost", [one["field"] for one in shown], [one["auc_lost"]["value"] for one in shown]
        ),
        table([("", head)], rows, "importance of fields"),
    ]


def _signed(value: float | None) -> str | None:
    return None if value is None else f"{value:+.5f}"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _paragraph(text: str) -> str:
    return f"<p>{_escaped(text)}</p>"


def _note(text: str) -> str:
    return f"<p class='note'>{_escaped(text)}</p>"


def _list(values: Any) -> list[float | None]:
    return [round(float(v), 8) if math.isfinite(v) else None for v in values]
