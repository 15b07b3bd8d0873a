"""The results of an evaluation as lines for a terminal."""

from typing import Any

from dlrm.command_line import aligned
from dlrm.metrics.intervals import decimals
from dlrm.metrics.table import TESTED, title

IN_SLICES = [*TESTED, "ece"]  # metrics that tables of slices show
_CHANGED = ("log_loss", "normalized_entropy", "calibration", "ece")  # by a recalibration


def lines_of(facts: dict[str, Any]) -> list[str]:
    """Returns the lines: the metrics, then each table of slices, then notes."""
    counts = f"{facts['rows']:,} rows, {facts['clicks']:,} clicks"
    lines = [
        f"{facts['checkpoint']} on {where(facts)}: {counts}",
        facts["intervals"],
    ]
    if facts["against"]:
        lines.append(f"against {facts['against']}; differences are the first minus the second")
    lines += ["", *aligned(*metric_table(facts))]
    after = facts.get("recalibration")
    if after:
        lines += ["", "recalibrated, judged on the half it was not fitted to:"]
        lines += aligned(*recalibration_table(facts))
    lines += ["", *aligned(*decile_table(facts["curves"][0]["reliability"]))]
    if after:
        lines += ["", "recalibrated:", *aligned(*decile_table(after["reliability"]))]
    for place, sliced in enumerate(facts["slices"]):
        recalibrated = after and after["slices"][place]
        table = slice_table(sliced, facts["against"] is not None, recalibrated)
        lines += ["", *aligned(*table)]
    if facts.get("importance"):
        rows = [
            [
                one["field"],
                *cells(one["auc_lost"], "+"),
                number_text(one["log_loss_gained"], sign="+"),
            ]
            for one in facts["importance"]
        ]
        heads = ["field", "AUC lost", "95 % interval", "log loss gained"]
        sample = f"{facts['importance_rows']:,} of {facts['rows']:,} rows"
        lines += [
            "",
            f"importance ({sample}): what is lost when a field's values are shuffled among rows",
        ]
        lines += aligned(heads, rows)
    return lines + [""] * bool(facts["notes"]) + facts["notes"]


def where(facts: dict[str, Any]) -> str:
    """Returns the sources of the rows, with the split and its role in the model's training."""
    split = ", ".join(filter(None, (facts["split"], facts["role"])))
    return ", ".join(facts["sources"]) + (f" ({split})" if split else "")


def metric_table(facts: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Returns the heads and rows of the table of metrics."""
    heads = ["metric", "value", "95 % interval"]
    if len(facts["models"]) > 1:
        heads += ["other", "difference", "95 % interval", "p"]
    return heads, [[title(name), *metric_cells(facts, name)] for name in facts["models"][0]]


def metric_cells(facts: dict[str, Any], name: str) -> list[str]:
    """Returns a metric's value and interval, and how the models differ if there are two."""
    first, *others = (model[name] for model in facts["models"])
    row = cells(first)
    if others:
        difference = facts["differences"][name]
        row += [number_text(others[0]["value"], digits_of(first)), *cells(difference, sign="+")]
        row.append(p_text(difference["p"]))
    return row


def recalibration_table(facts: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Returns the heads and rows of the table of metrics before and after a recalibration."""
    before, after = facts["models"][0], facts["recalibration"]["judged"]
    rows = [
        [title(name), interval_text(before[name]), interval_text(after[name])] for name in _CHANGED
    ]
    return ["metric", "before", "after"], rows


def decile_table(reliability: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Returns the heads and rows of the table of predicted and observed rates, lowest first."""
    heads = ["decile of the scores", "rows", "predicted", "observed", "95 % interval", "gap"]
    rows = []
    for place, weight in enumerate(reliability["weight"]):
        predicted, observed, low, high = (
            reliability[name][place] for name in ("predicted", "observed", "low", "high")
        )
        observed_text, bounds = cells({"value": observed, "low": low, "high": high})
        gap = number_text(predicted - observed, sign="+")
        count = f"{weight:,.0f}"
        rows.append([str(place + 1), count, number_text(predicted), observed_text, bounds, gap])
    return heads, rows


def slice_table(
    sliced: dict[str, Any], compared: bool, recalibrated: dict[str, Any] | None = None
) -> tuple[list[str], list[list[str]]]:
    """Returns the heads and rows of a table of slices.

    Args:
        sliced: a division of the rows.
        compared: there is a second model.
        recalibrated: the same division of recalibrated rows.
    """
    heads = [sliced["by"], "rows", "clicks", *map(title, IN_SLICES)]
    heads += ["recalibrated"] * bool(recalibrated)
    heads += ["AUC difference"] * compared
    rows = []
    for place, part in enumerate(sliced["slices"]):
        first = part["models"][0]
        row = [part["name"], f"{part['rows']:,}", f"{part['clicks']:,}"]
        row += [interval_text(first[name]) for name in IN_SLICES]
        if recalibrated:
            row.append(interval_text(recalibrated["slices"][place]["models"][0]["ece"]))
        if compared:
            row.append(interval_text(part["differences"]["auc"], sign="+"))
        rows.append(row)
    return heads, rows


def digits_of(interval: dict[str, float | None]) -> int:
    """Returns the digits of a value, which follow the width of its interval."""
    return decimals(interval["low"], interval["high"])


def number_text(value: float | None, digits: int = 4, sign: str = "") -> str:
    """Returns a number, or a dash if a metric is undefined."""
    return "–" if value is None else f"{value:{sign}.{digits}f}"


def interval_text(interval: dict[str, float | None], sign: str = "") -> str:
    """Returns a value with its bounds in brackets."""
    value, bounds = cells(interval, sign)
    return value if bounds == "–" else f"{value} [{bounds.replace(' to ', ', ')}]"


def p_text(p: float | None) -> str:
    """Returns the text of a p-value."""
    return "< 0.001" if p is not None and p < 0.001 else number_text(p, digits=3)


def cells(interval: dict[str, float | None], sign: str = "") -> list[str]:
    """Returns a value, and its bounds."""
    digits = digits_of(interval)
    value, low, high = (number_text(interval[k], digits, sign) for k in ("value", "low", "high"))
    return [value, "–" if interval["low"] is None else f"{low} to {high}"]
