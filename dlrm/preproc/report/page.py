"""The page of a report: tiles, and tables with bars, which only repeat what the text says."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dlrm.pages import Bar, Cell, Section, Tile, details, document, note, table

if TYPE_CHECKING:
    from markupsafe import Markup

Field = dict[str, Any]
_WORST = 10
_DRIFT_LEVELS = ((0.25, "large"), (0.1, "some"))  # customary for the population stability index
_DRIFT_ENDS = 0.3, 0.6  # least and greatest end of the scale of drift
_DRIFT_NOTE = (
    "Population stability index against all training rows. The dashed lines are at 0.1, "
    "customarily called some drift, and at 0.25, large drift; bars end at {:.2g}. Of few rows it "
    "is high by chance, about 10 over their number."
)
_NUMERICAL_NOTE = (
    "Quantiles are of the training rows, before the transform, to the width of a bin: about 1 % of "
    "the transformed number."
)
_CATEGORICAL_NOTE = (
    "Distinct values are those of the training rows. Those that occur as often as the limit says "
    "get an id; the table's rows are these ids, and id 0. Without id are values that are rarer or "
    "were not seen, missing ones not counted."
)
_LISTS_NOTE = (
    "Lengths are those of the training rows, after longer lists are cut. Missing values within a "
    "list count as values without id."
)


def page(facts: dict[str, Any]) -> str:
    """Returns the page of a report."""
    fields = [*facts["numerical"], *facts["categorical"]]
    parts = [(name, facts["splits"][name]["rows"]) for name in fields[0]["drift"]["splits"]]
    parts += [(entry["slice"], entry["rows"]) for entry in facts["slices"]]
    drifts = [(f["name"], [*f["drift"]["splits"].values(), *f["drift"]["slices"]]) for f in fields]
    sections = [
        Section("Largest drifts", _drifts(drifts, parts), half=True),
        Section("Splits", _splits(facts), half=True),
    ]
    if facts["slices"]:
        name = {"day": "Days", "file": "Files"}.get(facts["sliced_by"], "Parts of the rows")
        sections.append(Section(name, _slices(facts["slices"], facts["sliced_by"])))
    if facts["numerical"]:
        sections.append(Section("Numerical fields", _numerical(facts["numerical"])))
    if facts["categorical"]:
        sections.append(Section("Categorical fields", _categorical(facts["categorical"])))
    if lists := [field for field in facts["categorical"] if "list" in field]:
        sections.append(Section("Lists", _lists(lists)))
    left_out: list[list[Cell]] = [[one["file"], one["rows"]] for one in facts["rows_quarantined"]]
    if left_out:
        shown = table([("", ["file", "rows"])], left_out, "Rows that could not be read")
        sections.append(Section("Rows left out", [shown]))

    splits, label = facts["splits"], facts["label"]
    rows, positives = (sum(one[key] for one in splits.values()) for key in ("rows", "positives"))
    positive = [label["positive"]] if isinstance(label["positive"], str) else label["positive"]
    meaning = label["column"] + (f" is {' or '.join(positive)}" if positive else "")
    by_split = ", ".join(f"{name} {split['rows']:,}" for name, split in splits.items())
    kinds = f"{len(facts['numerical'])} numerical, {len(facts['categorical'])} categorical"
    drifted = sum(max(values, default=0) >= _DRIFT_LEVELS[-1][0] for _, values in drifts)
    tiles = [
        Tile("rows", f"{rows:,}", by_split),
        Tile("positive", _percent(positives / rows) or "", f"{positives:,} rows"),
        Tile(
            "rows that could not be read", f"{sum(e['rows'] for e in facts['rows_quarantined']):,}"
        ),
        Tile("fields", f"{len(fields):,}", kinds),
        Tile("fields that drift", f"{drifted:,}" if parts else "–", "by 0.1 or more"),
    ]
    summary = f"{rows:,} rows, {_percent(positives / rows)} of them positive ({meaning})."
    return document("Dataset report", [summary], tiles, sections)


def _drifts(
    drifts: Sequence[tuple[str, list[float]]], parts: Sequence[tuple[str, int]]
) -> list["Markup"]:
    """Returns the fields that drift most, and all of them on demand."""
    if not parts:
        return [note("There are no rows to compare with the training rows.")]
    worst = sorted(drifts, key=lambda pair: -max(pair[1]))[:_WORST]
    end = min(max(*worst[0][1], _DRIFT_ENDS[0]), _DRIFT_ENDS[1])
    marks = [limit / end for limit, _ in _DRIFT_LEVELS]

    def bar(value: float) -> Bar:
        return Bar(f"{value:.3f}", min(value / end, 1), marks=marks, level=_level(value))

    lines: list[list[Cell]] = []
    for name, values in worst:
        value = max(values)
        part, rows = parts[values.index(value)]
        lines.append([name, part, bar(value), _level(value), rows])
    head = [("", ["field", "in", "drift", "level", "rows"])]
    title = f"The {len(lines)} fields that drift most, and where most"
    everything: list[list[Cell]] = [[name, *map(bar, values)] for name, values in drifts]
    heads = [("", ["field", *(name for name, _ in parts)])]
    every = table(heads, everything, "Drift of every field", full=True)
    shown = table(head, lines, title, full=True)
    return [note(_DRIFT_NOTE.format(end)), shown, details("All drifts", every)]


def _level(drift: float) -> str:
    return next((name for limit, name in _DRIFT_LEVELS if drift >= limit), "")


def _splits(facts: dict[str, Any]) -> list["Markup"]:
    told, negatives = facts["division"], facts["negatives"]
    if negatives["kept"] < 1:
        told += (
            f"Of the training rows with label 0 a share of {negatives['kept']:g} is kept; "
            f"{negatives['rows_left_out']:,} are left out. "
        )
    told += "A number is clamped to 1 where its logarithm would be negative."
    most = max(1, *(split["rows"] for split in facts["splits"].values()))
    rows = [
        [name, Bar(f"{s['rows']:,}", s["rows"] / most), s["positives"]]
        + [_percent(s["positive_rate"]), s["values_raised_to_1"]]
        for name, s in facts["splits"].items()
    ]
    head = [("", ["split", "rows", "positive", "share positive", "values clamped to 1"])]
    return [note(told), table(head, rows, "Rows of each split", full=True)]


def _slices(slices: Sequence[dict[str, Any]], kind: str) -> list["Markup"]:
    told = [] if kind in ("day", "file") else [note(f"Each part has the rows of {kind}.")]
    shares = [one["positive_rate"] or 0 for one in slices]
    most, highest = max(1, *(one["rows"] for one in slices)), max(1e-12, *shares)
    lines: list[list[Cell]] = [
        [one["slice"], Bar(f"{one['rows']:,}", one["rows"] / most)]
        + [Bar(_percent(share) or "", share / highest)]
        for one, share in zip(slices, shares, strict=True)
    ]
    head = [("", ["part", "rows", "share positive"])]
    return [*told, table(head, lines, "Rows and positive ones of each part", full=True)]


def _numerical(fields: Sequence[Field]) -> list["Markup"]:
    columns = {"transform": "transform"}
    shown = {"missing": "missing in", "quantiles": "quantiles"}
    return _fields(fields, columns, shown, "Missing values and quantiles", _NUMERICAL_NOTE)


def _categorical(fields: Sequence[Field]) -> list["Markup"]:
    hashed, told = any(field["hash_buckets"] for field in fields), _CATEGORICAL_NOTE
    columns = {"distinct values": "distinct_values", "limit": "frequency_limit"}
    shown = {"missing": "missing in", "values_without_id": "without id in"}
    if any(field["max_ids"] is not None for field in fields):
        columns["ids at most"] = "max_ids"
    if hashed:
        columns["hash buckets"] = "hash_buckets"
        shown["values_in_buckets"] = "in hash buckets in"
        told += " Such values share the ids of hash buckets where a field has some."
    columns["table rows"] = "cardinality"
    return _fields(fields, columns, shown, "Values and ids", told)


def _lists(fields: Sequence[Field]) -> list["Markup"]:
    lists = [
        {"name": field["name"], **one, "mean_length": _number(one["mean_length"])}
        for field in fields
        for one in [field["list"]]
    ]
    columns = {"longest": "max_length", "mean length": "mean_length"}
    shown = {"length_quantiles": "quantiles of lengths", "empty": "empty in", "cut": "cut in"}
    return _fields(lists, columns, shown, "Lengths of lists", _LISTS_NOTE)


def _fields(
    fields: Sequence[Field], columns: dict[str, str], groups: dict[str, str], title: str, told: str
) -> list["Markup"]:
    """Returns a note, and a table with a row for each field.

    Args:
        columns: title of a column -> key of its fact.
        groups: key of facts by split or quantile -> title of their columns.
    """
    head = [("", ["field", *columns])]
    rows: list[list[Cell]] = [[f["name"], *map(f.get, columns.values())] for f in fields]
    for key, group in groups.items():
        of_quantiles = key.endswith("quantiles")
        names = [*fields[0][key]]
        head.append((group, [f"{100 * float(q):.0f} %" for q in names] if of_quantiles else names))
        for row, field in zip(rows, fields, strict=True):
            row += map(_number if of_quantiles else _share, field[key].values())
    return [note(told), table(head, rows, title, full=True)]


def _share(share: float | None) -> Cell:
    return None if share is None else Bar(_percent(share) or "", share)


def _percent(share: float | None) -> str | None:
    if share is None:
        return None
    return f"{100 * share:.2f} %" if share else "0"


def _number(value: float | None) -> str | None:
    if value is None:
        return None
    return f"{int(value):,}" if value == int(value) else f"{value:,}"
