"""The report on a dataset: what was in the logs, as numbers (report.json) and to look at (.html).

Both depend on the logs and the options alone, so that the same logs have the same report.
"""

import html
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dlrm.data.clicks import layout
from dlrm.data.transform.transform import Transform
from dlrm.preproc.logs.column_statistics import Statistics, number_of_bin
from dlrm.preproc.logs.counted_splits import QUARANTINE
from dlrm.preproc.logs.raw_log import Split
from dlrm.preproc.logs.stage import Run

JSON, HTML = "report.json", "report.html"
_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_SHARE_FLOOR = 1e-4  # of a bin that is empty on one side of a comparison
_DRIFT_LEVELS = ((0.25, "large"), (0.1, "some"))  # customary for the population stability index


def write(
    run: Run, splits: Sequence[Split], fitted: Transform, totals: dict[str, dict[str, int]]
) -> None:
    """Writes the report of a run whose rows are all transformed."""
    counts = _by_name_and_day(run, splits)
    merged = run.work.result("merged")
    facts = {
        "days": _days(counts),
        "splits": _splits(totals, counts),
        "numerical": _numerical(counts, fitted),
        "categorical": _categorical(counts, fitted, merged),
        "lines_rejected": _rejected(run),
    }
    (run.work.output / JSON).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    (run.work.output / HTML).write_text(_page(facts), encoding="utf-8")


def _by_name_and_day(run: Run, splits: Sequence[Split]) -> dict[tuple[str, int], Statistics]:
    folder = run.work.folder("transform.statistics")
    counts: dict[tuple[str, int], Statistics] = {}
    for number, split in enumerate(splits):
        for name, part in Statistics.load(folder / str(number)).items():
            key = (name, split.day)
            counts[key] = counts[key] + part if key in counts else part
    return counts


def _total(
    counts: dict[tuple[str, int], Statistics], name: str | None = None, day: int | None = None
) -> Statistics:
    first = next(iter(counts.values()))
    total = Statistics.empty(len(first.numbers), len(first.ids))
    for (split, of_day), part in counts.items():
        if name in (None, split) and day in (None, of_day):
            total += part
    return total


def _share(part: Any, whole: Any) -> float | None:
    return round(float(part) / float(whole), 6) if whole else None


def _days(counts: dict[tuple[str, int], Statistics]) -> list[dict[str, Any]]:
    days = []
    for day in sorted({day for _, day in counts}):
        rows, clicks, _ = _total(counts, day=day).totals.tolist()
        days.append(
            {"day": day, "rows": rows, "clicks": clicks, "click_through_rate": _share(clicks, rows)}
        )
    return days


def _splits(
    totals: dict[str, dict[str, int]], counts: dict[tuple[str, int], Statistics]
) -> dict[str, Any]:
    return {
        name: {
            "rows": total.get("rows", 0),
            "clicks": total.get("clicks", 0),
            "click_through_rate": _share(total.get("clicks", 0), total.get("rows", 0)),
            "values_raised_to_1": total.get("clamped", 0),
        }
        for name, total in totals.items()
    }


def _numerical(
    counts: dict[tuple[str, int], Statistics], fitted: Transform
) -> list[dict[str, Any]]:
    train, shift = _total(counts, name="train"), 2 if fitted.numeric_transform == "readme" else 3
    features = []
    for i in range(fitted.num_numerical):
        histogram = train.numbers[i]
        places = np.searchsorted(
            np.cumsum(histogram), np.array(_QUANTILES) * histogram.sum(), side="left"
        )
        values = np.exp(number_of_bin(np.minimum(places, len(histogram) - 1))) - shift
        known = bool(histogram.sum())
        features.append(
            {
                "name": layout.numerical_name(i),
                "missing": _missing(counts, i),
                "quantiles": {
                    str(q): float(f"{round(float(value)):.3g}") if known else None
                    for q, value in zip(_QUANTILES, values, strict=True)
                },
                "drift": _drift(counts, lambda part, i=i: _deciles(part, i, train)),
            }
        )
    return features


def _deciles(part: Statistics, i: int, train: Statistics) -> np.ndarray:
    """Rows in the tenths of the training rows, and those without a value."""
    cumulated = np.cumsum(train.numbers[i])
    edges = np.searchsorted(cumulated, cumulated[-1] * np.arange(1, 10) / 10) + 1
    tenths = np.add.reduceat(np.append(part.numbers[i], 0), np.r_[0, np.unique(edges)])
    return np.r_[part.missing[i], tenths]


def _categorical(
    counts: dict[tuple[str, int], Statistics], fitted: Transform, merged: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    features = []
    for i in range(fitted.num_categorical):
        column = fitted.num_numerical + i

        def with_missing(part: Statistics, i: int = i, column: int = column) -> np.ndarray:
            return np.r_[part.missing[column], part.ids[i]]

        without_id = {}
        for name in layout.SPLITS:
            part = _total(counts, name=name)
            without_id[name] = _share(part.ids[i, 0], part.ids[i].sum())
        features.append(
            {
                "name": layout.categorical_name(i),
                "missing": _missing(counts, column),
                "distinct_values": sum(bucket["distinct"][i] for bucket in merged),
                "cardinality": fitted.cardinalities[i],
                "frequency_limit": fitted.frequency_limit.of(i),
                "values_without_id": without_id,
                "drift": _drift(counts, with_missing),
            }
        )
    return features


def _missing(counts: dict[tuple[str, int], Statistics], column: int) -> dict[str, float | None]:
    shares = {}
    for name in layout.SPLITS:
        part = _total(counts, name=name)
        shares[name] = _share(part.missing[column], part.totals[0])
    return shares


def _drift(counts: dict[tuple[str, int], Statistics], histogram: Any) -> list[float]:
    """The population stability index of each day against all training rows."""
    usual = _shares(histogram(_total(counts, name="train")))
    days = sorted({day for _, day in counts})
    drift = []
    for day in days:
        found = _shares(histogram(_total(counts, day=day)))
        drift.append(round(float(((found - usual) * np.log(found / usual)).sum()), 4))
    return drift


def _shares(histogram: np.ndarray) -> np.ndarray:
    return np.maximum(histogram / max(histogram.sum(), 1), _SHARE_FLOOR)


def _rejected(run: Run) -> dict[str, int]:
    folder = run.work.output / QUARANTINE
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return {path.name: path.read_text(encoding="utf-8").count("\n") for path in files}


# The page: tables and plots without scripts or anything from elsewhere.

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1em;
       color: #222 }
h2 { margin-top: 2em } .note { color: #555; max-width: 56em } .wide { overflow-x: auto }
table { border-collapse: collapse; margin: 1em 0 } th { font-weight: 600; text-align: right }
td, th { padding: .15em .7em; border-bottom: 1px solid #ddd; white-space: nowrap }
td { text-align: right; font-variant-numeric: tabular-nums }
td:first-child, th:first-child { text-align: left } th.group { text-align: center }
.large { background: #f4b6a6 } .some { background: #fbe7b2 }
figure { display: inline-block; margin: 1em 3em 0 0; vertical-align: top }
svg text { font: 11px system-ui, sans-serif; fill: #444 }
"""
_Head = Sequence[tuple[str, Sequence[str]]]  # of columns: a title over them, and theirs


def _page(facts: dict[str, Any]) -> str:
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Dataset report</title>",
        f"<style>{_STYLE}</style><h1>Dataset report</h1>",
        *_splits_and_days(facts),
        "<h2>Numerical features</h2>",
        "<p class='note'>Quantiles are of the training rows, before the logarithm, within 3 %.</p>",
        _numerical_table(facts["numerical"]),
        "<h2>Categorical features</h2>",
        "<p class='note'>Distinct values are those of the dictionary's days. Those that occur as "
        "often as the limit says get an id; the table's rows are these ids, and id 0. "
        "Without id are values that are rarer or were not seen, missing ones not counted.</p>",
        _categorical_table(facts["categorical"]),
        "<h2>Missing values</h2>",
        _missing_plot(facts),
        "<h2>Drift</h2><p class='note'>Population stability index of each day against all training "
        "rows; <span class='some'>0.1</span> is customarily called some drift, "
        "<span class='large'>0.25</span> a large one.</p>",
        _drift_table(facts),
    ]
    if facts["lines_rejected"]:
        files = [list(item) for item in facts["lines_rejected"].items()]
        parts += ["<h2>Lines left out</h2>", _table([("", ["file", "lines"])], files)]
    return "\n".join(parts) + "</html>\n"


def _splits_and_days(facts: dict[str, Any]) -> list[str]:
    days, splits = facts["days"], facts["splits"].items()
    rows, clicks = (sum(day[name] for day in days) for name in ("rows", "clicks"))
    names = [str(day["day"]) for day in days]
    return [
        f"<p>{rows:,} rows of {len(days)} days, {_percent(_share(clicks, rows))} of them clicked; "
        f"{len(facts['numerical'])} numerical and {len(facts['categorical'])} categorical features."
        "</p><h2>Splits</h2>",
        "<p class='note'>The last day is held out: its first half is test, the rest validation. "
        "A number is raised to 1 where its logarithm would be negative.</p>",
        _table(
            [("", ["split", "rows", "clicks", "click-through rate", "values raised to 1"])],
            [
                [n, s["rows"], s["clicks"], _percent(s["click_through_rate"])]
                + [s["values_raised_to_1"]]
                for n, s in splits
            ],
        ),
        "<h2>Days</h2>",
        _bars("rows", _whole, names, [d["rows"] for d in days]),
        _bars("click-through rate", _percent, names, [d["click_through_rate"] or 0 for d in days]),
    ]


def _numerical_table(features: list[dict[str, Any]]) -> str:
    return _table(
        [
            ("", ["feature"]),
            ("missing in", layout.SPLITS),
            ("quantiles", [f"{100 * q:.0f} %" for q in _QUANTILES]),
        ],
        [
            [f["name"], *map(_percent, f["missing"].values())]
            + [None if q is None else int(q) for q in f["quantiles"].values()]
            for f in features
        ],
    )


def _categorical_table(features: list[dict[str, Any]]) -> str:
    return _table(
        [
            ("", ["feature", "distinct values", "limit", "table rows"]),
            ("missing in", layout.SPLITS),
            ("without id in", layout.SPLITS),
        ],
        [
            [_name(f), f["distinct_values"], f["frequency_limit"], f["cardinality"]]
            + [_percent(f[shares][n]) for shares in _SHARES for n in layout.SPLITS]
            for f in features
        ],
    )


_SHARES = ("missing", "values_without_id")


def _name(feature: dict[str, Any]) -> str:
    return feature["name"].removesuffix(".bin")


def _percent(share: float | None) -> str | None:
    if share is None:
        return None
    return f"{100 * share:.2f} %" if share else "0"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _missing_plot(facts: dict[str, Any]) -> str:
    features = [*facts["numerical"], *facts["categorical"]]
    names = [_name(f) for f in features]
    return _bars("train", _percent, names, [f["missing"]["train"] or 0 for f in features])


def _drift_table(facts: dict[str, Any]) -> str:
    rows = []
    for feature in [*facts["numerical"], *facts["categorical"]]:
        cells = []
        for value in feature["drift"]:
            level = next((name for limit, name in _DRIFT_LEVELS if value >= limit), "")
            cells.append(f"<td class='{level}'>{value:.3f}</td>")
        rows.append(f"<tr><td>{html.escape(_name(feature))}</td>{''.join(cells)}</tr>")
    head = "".join(f"<th>day {day['day']}</th>" for day in facts["days"])
    return f"<div class='wide'><table><tr><th>feature</th>{head}</tr>{''.join(rows)}</table></div>"


def _table(head: _Head, rows: Sequence[Sequence[Any]]) -> str:
    lines = []
    if len(head) > 1:
        groups = [f"<th class='group' colspan='{len(c)}'>{html.escape(g)}</th>" for g, c in head]
        lines.append("".join(groups))
    lines.append("".join(f"<th>{html.escape(text)}</th>" for _, c in head for text in c))
    lines += ["".join(f"<td>{_cell(value)}</td>" for value in row) for row in rows]
    text = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<div class='wide'><table>{text}</table></div>"


def _cell(value: str | int | None) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else html.escape(value)


def _bars(
    title: str, shown: Callable[[float], str | None], names: Sequence[str], values: Sequence[float]
) -> str:
    """A bar chart as SVG, up to the highest value; `shown` writes one."""
    step = min(max(360 // max(len(names), 1), 18), 48)
    height, top = 110, 24
    base, width = top + height, step * len(names)
    highest = max([*values, 1e-12])
    title = f"{title}, up to {shown(highest)}"
    shapes = [f"<text x='0' y='12'>{html.escape(title)}</text>"]
    shapes.append(f"<path d='M0 {base}.5H{width}' stroke='#888'/>")
    longest = max([len(name) for name in names], default=0)
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        bar, x = height * value / highest, step * i
        shapes.append(
            f"<rect x='{x + 2}' y='{base - bar:.1f}' width='{step - 4}' height='{bar:.1f}' "
            f"fill='#4878a8'><title>{html.escape(f'{name}: {shown(value)}')}</title></rect>"
        )
        if longest <= 3:
            place = f"x='{x + step // 2}' y='{base + 14}' text-anchor='middle'"
        else:
            place = f"transform='translate({x + step // 2 - 3},{base + 10}) rotate(60)'"
        shapes.append(f"<text {place}>{html.escape(name)}</text>")
    size = f"width='{max(width, 8 * len(title)) + 30}' height='{base + 10 + 6 * longest}'"
    return f"<figure><svg {size}>{''.join(shapes)}</svg></figure>"
