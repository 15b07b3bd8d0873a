"""The page of a report: tables with bars, without scripts or external resources.

It has one column on a phone and two on a wide screen. Wider tables scroll within their frame.
Colors and bars only repeat what the text says.
"""

import html
from collections.abc import Sequence
from typing import Any, NamedTuple

from dlrm.pages import Head, cell, document, scrolled

_WORST = 10
_DRIFT_LEVELS = ((0.25, "large"), (0.1, "some"))  # customary for the population stability index
_STYLE = """
body { font-size: 15px; margin: 0 auto; padding: 1rem; max-width: 100rem }
h1 { margin: 0 } h2 { margin: 0 0 .3rem; font-size: 1.25rem } p { margin: .3rem 0 .6rem }
main { display: grid; gap: 1.8rem 3rem; grid-template-columns: repeat(2, minmax(0, 1fr)) }
section, details { min-width: 0 } h1, .whole { grid-column: 1 / -1 } p.whole { margin-top: -1.4rem }
.pair { display: grid; gap: 0 2rem; grid-template-columns: repeat(2, minmax(0, 1fr)) }
.wide { margin: .4rem 0 } table { margin: 0 } .full { width: 100% }
caption { text-align: left; font-weight: 600; padding: .2rem 0 }
td, th { padding: .2rem .6rem } thead th { border-bottom-color: #999 }
th.group { text-align: center; border-bottom-color: #ddd } td:first-child { text-align: right }
tbody th, thead th:first-child, .full th { text-align: left }
tbody th, thead th:first-child { position: sticky; left: 0; background: #fff }
tbody th { font-weight: 400 }
.name { display: inline-block; width: max-content; max-width: 20rem; white-space: normal;
        overflow-wrap: break-word }
td.bar { background: linear-gradient(#b9d3ec, #b9d3ec) left / var(--w) 100% no-repeat }
.full td.bar { width: 100%; text-align: left }
.full td:nth-of-type(1) { text-align: left }
td.bar.large { background: linear-gradient(#f4b6a6, #f4b6a6) left / var(--w) 100% no-repeat }
td.bar.some { background: linear-gradient(#fbe7b2, #fbe7b2) left / var(--w) 100% no-repeat }
summary { cursor: pointer; padding: .4rem 0; font-weight: 600 }
:focus-visible { outline: 2px solid #1c5fa8 }
@media (max-width: 75rem) { main { grid-template-columns: minmax(0, 1fr) } }
@media (max-width: 40rem) {
  body { padding: .7rem } td, th { padding: .3rem .4rem } .pair { display: block }
  .name { max-width: 34vw }
}
"""


class Bar(NamedTuple):
    """A cell with text on a bar.

    Attributes:
        text: text of the cell.
        share: length of the bar, 0 to 1.
        level: class of its color, which another cell repeats as text.
    """

    text: str
    share: float
    level: str = ""


Cell = Bar | str | int | None


def page(facts: dict[str, Any]) -> str:
    """Returns the page of a report."""
    facts = _with_words(facts)
    largest, every = _drifts(facts)
    parts = [
        f"<p class='whole'>{html.escape(facts['summary'])}</p>",
        _section("Largest drifts", largest),
        _section("Splits", _splits(facts)),
        every,
    ]
    if facts["slices"]:
        title = {"day": "Days", "file": "Files"}.get(facts["sliced_by"], "Parts of the rows")
        parts.append(_section(title, _slices(facts), whole=True))
    if facts["numerical"]:
        parts.append(_section("Numerical features", _numerical(facts), whole=True))
    if facts["categorical"]:
        parts.append(_section("Categorical features", _categorical(facts), whole=True))
    if lists := [entry for entry in facts["categorical"] if "list" in entry]:
        parts.append(_section("Lists", _lists(lists), whole=True))
    if facts["left_out"]:
        table = _table("Rows that could not be read", [("", ["file", "rows"])], facts["left_out"])
        parts.append(_section("Rows left out", table))
    return document("Dataset report", parts, _STYLE)


def _with_words(facts: dict[str, Any]) -> dict[str, Any]:
    splits, label = facts["splits"].values(), facts["label"]
    rows, positives = (sum(split[name] for split in splits) for name in ("rows", "positives"))
    positive = label["positive"] or ()
    positive = [positive] if isinstance(positive, str) else positive
    meaning = label["column"] + (f" is {' or '.join(positive)}" if positive else "")
    note, negatives = facts["division"], facts["negatives"]
    if negatives["kept"] < 1:
        note += (
            f"Of the training rows with label 0 a share of {negatives['kept']:g} is kept; "
            f"{negatives['rows_left_out']:,} are left out. "
        )
    return facts | {
        "summary": f"{rows:,} rows, {_percent(positives / rows)} of them positive ({meaning}); "
        + _num_features(facts),
        "split_note": note,
        "words": ("positive", "share positive"),
        "counted": "of the training rows",
        "left_out": [(entry["file"], entry["rows"]) for entry in facts["rows_quarantined"]],
    }


def _num_features(facts: dict[str, Any]) -> str:
    counts = len(facts["numerical"]), len(facts["categorical"])
    return f"{counts[0]} numerical and {counts[1]} categorical features."


def _section(title: str, content: str, whole: bool = False) -> str:
    kind = " class='whole'" if whole else ""
    return f"<section{kind}><h2>{html.escape(title)}</h2>{content}</section>"


def _drifts(facts: dict[str, Any]) -> tuple[str, str]:
    """Returns the features that drift most, and a section to expand with all of them."""
    features = [*facts["numerical"], *facts["categorical"]]
    parts = {name: facts["splits"][name]["rows"] for name in features[0]["drift"]["splits"]}
    rows = [*parts.values(), *(entry["rows"] for entry in facts["slices"])]
    names = [*parts, *(entry["slice"] for entry in facts["slices"])]
    table = [[*f["drift"]["splits"].values(), *f["drift"]["slices"]] for f in features]
    if not names:
        return "<p class='note'>There are no rows to compare with the training rows.</p>", ""
    worst = sorted(
        ((max(values), values, f["name"]) for f, values in zip(features, table, strict=True)),
        key=lambda entry: -entry[0],
    )[:_WORST]
    lines = []
    for value, values, name in worst:
        place, share = values.index(value), value / max(worst[0][0], 1e-12)
        bar = Bar(f"{value:.3f}", share, _level(value))
        lines.append([name, names[place], bar, _level(value), rows[place]])
    everything = [
        [feature["name"], *(Bar(f"{value:.3f}", min(value, 1), _level(value)) for value in values)]
        for feature, values in zip(features, table, strict=True)
    ]
    note = (
        "<p class='note'>Population stability index against all training rows: 0.1 is customarily "
        "called <span class='some'>some</span> drift, 0.25 a <span class='large'>large</span> one. "
        "Of few rows it is high by chance, about 10 over their number.</p>"
    )
    head = [("", ["feature", "in", "drift", "level", "rows"])]
    title = f"The {len(lines)} features that drift most, and where most"
    every = _table("Drift of every feature", [("", ["feature", *names])], everything)
    return (
        note + _table(title, head, lines, full=True),
        f"<details class='whole'><summary>All drifts</summary>{every}</details>",
    )


def _level(drift: float) -> str:
    return next((name for limit, name in _DRIFT_LEVELS if drift >= limit), "")


def _splits(facts: dict[str, Any]) -> str:
    splits = facts["splits"].items()
    most = max(split["rows"] for _, split in splits)
    return (
        f"<p class='note'>{facts['split_note']}A number is clamped to 1 where its logarithm would "
        "be negative.</p>"
    ) + _table(
        "Rows of each split",
        [("", ["split", "rows", *facts["words"], "values clamped to 1"])],
        [
            [name, Bar(_whole(s["rows"]), s["rows"] / max(most, 1)), s["positives"]]
            + [_percent(s["positive_rate"]), s["values_raised_to_1"]]
            for name, s in splits
        ],
    )


def _slices(facts: dict[str, Any]) -> str:
    slices, kind = facts["slices"], facts["sliced_by"]
    note = ""
    if kind not in ("day", "file"):
        note = f"<p class='note'>Each part has the rows of {html.escape(kind)}.</p>"
    tables = []
    for key, title, shown in (
        ("rows", "rows", _whole),
        ("positive_rate", facts["words"][1], _percent),
    ):
        values = [entry[key] or 0 for entry in slices]
        highest = max([*values, 1e-12])
        lines = [
            [entry["slice"], Bar(shown(value) or "", value / highest)]
            for entry, value in zip(slices, values, strict=True)
        ]
        heading = f"{title[0].upper()}{title[1:]}, up to {shown(highest)}"
        tables.append(_table(heading, [("", ["part", title])], lines, full=True))
    return f"{note}<div class='pair'>{''.join(tables)}</div>"


def _numerical(facts: dict[str, Any]) -> str:
    features, quantiles = facts["numerical"], facts["numerical"][0]["quantiles"]
    splits, rules = list(features[0]["missing"]), "transform" in features[0]
    return (
        "<p class='note'>Quantiles are of the training rows, before the transform, to the width "
        "of a bin: about 1 % of the transformed number.</p>"
    ) + _table(
        "Numerical features",
        [
            ("", ["feature"] + ["transform"] * rules),
            ("missing in", splits),
            ("quantiles", [f"{100 * float(q):.0f} %" for q in quantiles]),
        ],
        [
            [f["name"], *([f["transform"]] if rules else [])]
            + [_bar_of(value) for value in f["missing"].values()]
            + [_number(q) for q in f["quantiles"].values()]
            for f in features
        ],
    )


def _categorical(facts: dict[str, Any]) -> str:
    features = facts["categorical"]
    splits = list(features[0]["missing"])
    shares = {"missing in": "missing", "without id in": "values_without_id"}
    note = "Without id are values that are rarer or were not seen, missing ones not counted."
    capped = any(f.get("max_ids") is not None for f in features)
    hashed = any(f.get("hash_buckets") for f in features)
    if hashed:
        shares["in hash buckets in"] = "values_in_buckets"
        note += " Such values share the ids of hash buckets where a field has some."
    counts = {"distinct values": "distinct_values", "limit": "frequency_limit"}
    counts |= {"ids at most": "max_ids"} if capped else {}
    counts |= {"hash buckets": "hash_buckets"} if hashed else {}
    counts |= {"table rows": "cardinality"}
    return (
        f"<p class='note'>Distinct values are those {facts['counted']}. Those that occur as often "
        f"as the limit says get an id; the table's rows are these ids, and id 0. {note}</p>"
    ) + _table(
        "Categorical features",
        [("", ["feature", *counts]), *((title, splits) for title in shares)],
        [
            [f["name"], *(f[key] for key in counts.values())]
            + [_bar_of(f[key][name]) for key in shares.values() for name in splits]
            for f in features
        ],
    )


def _lists(features: Sequence[dict[str, Any]]) -> str:
    first = features[0]["list"]
    splits, quantiles = list(first["empty"]), list(first["length_quantiles"])
    return (
        "<p class='note'>Lengths are those of the training rows, after longer lists are cut. "
        "Missing values within a list count as values without id.</p>"
    ) + _table(
        "Lists",
        [
            ("", ["feature", "longest", "mean length"]),
            ("quantiles of lengths", [f"{100 * float(q):.0f} %" for q in quantiles]),
            ("empty in", splits),
            ("cut in", splits),
        ],
        [
            [f["name"], f["list"]["max_length"], _number(f["list"]["mean_length"])]
            + [_number(q) for q in f["list"]["length_quantiles"].values()]
            + [_bar_of(f["list"][key][name]) for key in ("empty", "cut") for name in splits]
            for f in features
        ],
    )


def _percent(share: float | None) -> str | None:
    if share is None:
        return None
    return f"{100 * share:.2f} %" if share else "0"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _number(value: float | None) -> str | None:
    if value is None:
        return None
    return f"{int(value):,}" if value == int(value) else f"{value:,}"


def _bar_of(share: float | None) -> Cell:
    return None if share is None else Bar(_percent(share) or "", share)


def _table(caption: str, head: Head, rows: Sequence[Sequence[Cell]], full: bool = False) -> str:
    """Returns a table in a scrolling frame; the first cell of each row is its header."""
    lines = []
    if len(head) > 1:
        groups = [
            f"<th class='group' scope='colgroup' colspan='{len(columns)}'>{html.escape(title)}</th>"
            if title
            else f"<td colspan='{len(columns)}'></td>"
            for title, columns in head
        ]
        lines.append("".join(groups))
    names = [name for _, columns in head for name in columns]
    lines.append("".join(f"<th scope='col'>{html.escape(name)}</th>" for name in names))
    head_text = "".join(f"<tr>{line}</tr>" for line in lines)
    body = "".join(
        f"<tr><th scope='row'><span class='name'>{html.escape(str(first))}</span></th>"
        f"{''.join(map(_cell, cells))}</tr>"
        for first, *cells in rows
    )
    kind = " class='full'" if full else ""
    content = (
        f"<table{kind}><caption>{html.escape(caption)}</caption>"
        f"<thead>{head_text}</thead><tbody>{body}</tbody></table>"
    )
    return scrolled(content, caption)


def _cell(value: Cell) -> str:
    if not isinstance(value, Bar):
        return f"<td>{cell(value)}</td>"
    kind = f"bar {value.level}".strip()
    return f"<td class='{kind}' style='--w:{100 * value.share:.1f}%'>{cell(value.text)}</td>"
