"""The page of a report: tiles, and tables with bars, which only repeat what the text says."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dlrm.pages import Bar, Cell, Section, Tile, details, document, grid, note, table

if TYPE_CHECKING:
    from markupsafe import Markup

_WORST = 10
_DRIFT_LEVELS = ((0.25, "large"), (0.1, "some"))  # customary for the population stability index
_DRIFT_ENDS = 0.3, 0.6  # least and greatest end of the scale of drift


def page(facts: dict[str, Any]) -> str:
    """Returns the page of a report."""
    facts = _with_words(facts)
    worst = _worst(facts)
    sections = [
        Section("Largest drifts", _drifts(facts, worst), half=True),
        Section("Splits", _splits(facts), half=True),
    ]
    if facts["slices"]:
        name = {"day": "Days", "file": "Files"}.get(facts["sliced_by"], "Parts of the rows")
        sections.append(Section(name, _slices(facts)))
    if facts["numerical"]:
        sections.append(Section("Numerical fields", _numerical(facts)))
    if facts["categorical"]:
        sections.append(Section("Categorical fields", _categorical(facts)))
    if lists := [entry for entry in facts["categorical"] if "list" in entry]:
        sections.append(Section("Lists", _lists(lists)))
    if facts["left_out"]:
        left_out = table([("", ["file", "rows"])], facts["left_out"], "Rows that could not be read")
        sections.append(Section("Rows left out", [left_out]))
    return document("Dataset report", [facts["summary"]], _tiles(facts, worst), sections)


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
        "summary": f"{rows:,} rows, {_percent(positives / rows)} of them positive ({meaning}).",
        "split_note": note,
        "left_out": [(entry["file"], entry["rows"]) for entry in facts["rows_quarantined"]],
    }


def _tiles(facts: dict[str, Any], worst: Sequence[tuple[float, str, int]]) -> list[Tile]:
    splits = facts["splits"]
    rows, positives = (sum(one[key] for one in splits.values()) for key in ("rows", "positives"))
    counts = len(facts["numerical"]), len(facts["categorical"])
    bad = sum(number for _, number in facts["left_out"])
    drifted = sum(value >= _DRIFT_LEVELS[-1][0] for value, *_ in worst)
    return [
        Tile(
            "rows", _whole(rows), ", ".join(f"{n} {_whole(s['rows'])}" for n, s in splits.items())
        ),
        Tile("positive", _percent(positives / rows) or "", f"{_whole(positives)} rows"),
        Tile("rows that could not be read", _whole(bad)),
        Tile("fields", _whole(sum(counts)), f"{counts[0]} numerical, {counts[1]} categorical"),
        Tile("fields that drift", _whole(drifted) if worst else "–", "by 0.1 or more"),
    ]


def _parts(facts: dict[str, Any]) -> list[tuple[str, int]]:
    """Returns the rows of each split and slice that is compared with the training rows."""
    first = [*facts["numerical"], *facts["categorical"]][0]
    names = [(name, facts["splits"][name]["rows"]) for name in first["drift"]["splits"]]
    return names + [(entry["slice"], entry["rows"]) for entry in facts["slices"]]


def _of_field(field: dict[str, Any]) -> list[float]:
    return [*field["drift"]["splits"].values(), *field["drift"]["slices"]]


def _worst(facts: dict[str, Any]) -> list[tuple[float, str, int]]:
    """Returns each field's largest drift, its name, and the place of the drift, largest first."""
    if not _parts(facts):
        return []
    drifts = [(f["name"], _of_field(f)) for f in (*facts["numerical"], *facts["categorical"])]
    found = [(max(values), name, values.index(max(values))) for name, values in drifts]
    return sorted(found, key=lambda entry: -entry[0])


def _drifts(facts: dict[str, Any], worst: Sequence[tuple[float, str, int]]) -> list["Markup"]:
    """Returns the fields that drift most, and all of them on demand."""
    if not worst:
        return [note("There are no rows to compare with the training rows.")]
    parts = _parts(facts)
    end = min(max(worst[0][0], _DRIFT_ENDS[0]), _DRIFT_ENDS[1])
    marks = [limit / end for limit, _ in _DRIFT_LEVELS]
    lines: list[list[Cell]] = [
        [name, parts[place][0], _drift(value, end, marks), _level(value), parts[place][1]]
        for value, name, place in worst[:_WORST]
    ]
    everything = [
        [field["name"], *(_drift(value, end, marks) for value in _of_field(field))]
        for field in (*facts["numerical"], *facts["categorical"])
    ]
    told = (
        "Population stability index against all training rows. The dashed lines are at 0.1, "
        f"customarily called some drift, and at 0.25, large drift; bars end at {end:.2g}. Of few "
        "rows it is high by chance, about 10 over their number."
    )
    head = [("", ["field", "in", "drift", "level", "rows"])]
    title = f"The {len(lines)} fields that drift most, and where most"
    heads = [("", ["field", *(name for name, _ in parts)])]
    every = table(heads, everything, "Drift of every field", full=True)
    return [note(told), table(head, lines, title, full=True), details("All drifts", every)]


def _drift(value: float, end: float, marks: Sequence[float]) -> Bar:
    return Bar(f"{value:.3f}", min(value / end, 1), marks=marks, level=_level(value))


def _level(drift: float) -> str:
    return next((name for limit, name in _DRIFT_LEVELS if drift >= limit), "")


def _splits(facts: dict[str, Any]) -> list["Markup"]:
    splits = facts["splits"].items()
    most = max(split["rows"] for _, split in splits)
    told = facts["split_note"] + "A number is clamped to 1 where its logarithm would be negative."
    rows = [
        [name, Bar(_whole(s["rows"]), s["rows"] / max(most, 1)), s["positives"]]
        + [_percent(s["positive_rate"]), s["values_raised_to_1"]]
        for name, s in splits
    ]
    head = [("", ["split", "rows", "positive", "share positive", "values clamped to 1"])]
    return [note(told), table(head, rows, "Rows of each split", full=True)]


def _slices(facts: dict[str, Any]) -> list["Markup"]:
    slices, kind = facts["slices"], facts["sliced_by"]
    told = [] if kind in ("day", "file") else [note(f"Each part has the rows of {kind}.")]
    tables = []
    for key, name, shown in (
        ("rows", "rows", _whole),
        ("positive_rate", "share positive", _percent),
    ):
        values = [entry[key] or 0 for entry in slices]
        highest = max([*values, 1e-12])
        lines = [
            [entry["slice"], Bar(shown(value) or "", value / highest)]
            for entry, value in zip(slices, values, strict=True)
        ]
        heading = f"{name[0].upper()}{name[1:]}, up to {shown(highest)}"
        tables.append(table([("", ["part", name])], lines, heading, full=True))
    return [*told, grid(tables, "pair")]


def _numerical(facts: dict[str, Any]) -> list["Markup"]:
    features, quantiles = facts["numerical"], facts["numerical"][0]["quantiles"]
    splits = list(features[0]["missing"])
    told = (
        "Quantiles are of the training rows, before the transform, to the width of a bin: about "
        "1 % of the transformed number."
    )
    head = [
        ("", ["field", "transform"]),
        ("missing in", splits),
        ("quantiles", [f"{100 * float(q):.0f} %" for q in quantiles]),
    ]
    rows = [
        [f["name"], f["transform"]]
        + [_bar_of(value) for value in f["missing"].values()]
        + [_number(q) for q in f["quantiles"].values()]
        for f in features
    ]
    return [note(told), table(head, rows, "Missing values and quantiles", full=True)]


def _categorical(facts: dict[str, Any]) -> list["Markup"]:
    features = facts["categorical"]
    splits = list(features[0]["missing"])
    shares = {"missing in": "missing", "without id in": "values_without_id"}
    told = (
        "Distinct values are those of the training rows. Those that occur as often as the limit "
        "says get an id; the table's rows are these ids, and id 0. Without id are values that are "
        "rarer or were not seen, missing ones not counted."
    )
    capped = any(f.get("max_ids") is not None for f in features)
    hashed = any(f.get("hash_buckets") for f in features)
    if hashed:
        shares["in hash buckets in"] = "values_in_buckets"
        told += " Such values share the ids of hash buckets where a field has some."
    counts = {"distinct values": "distinct_values", "limit": "frequency_limit"}
    counts |= {"ids at most": "max_ids"} if capped else {}
    counts |= {"hash buckets": "hash_buckets"} if hashed else {}
    counts |= {"table rows": "cardinality"}
    head = [("", ["field", *counts]), *((name, splits) for name in shares)]
    rows = [
        [f["name"], *(f[key] for key in counts.values())]
        + [_bar_of(f[key][name]) for key in shares.values() for name in splits]
        for f in features
    ]
    return [note(told), table(head, rows, "Values and ids", full=True)]


def _lists(features: Sequence[dict[str, Any]]) -> list["Markup"]:
    first = features[0]["list"]
    splits, quantiles = list(first["empty"]), list(first["length_quantiles"])
    told = (
        "Lengths are those of the training rows, after longer lists are cut. Missing values within "
        "a list count as values without id."
    )
    head = [
        ("", ["field", "longest", "mean length"]),
        ("quantiles of lengths", [f"{100 * float(q):.0f} %" for q in quantiles]),
        ("empty in", splits),
        ("cut in", splits),
    ]
    rows = [
        [f["name"], f["list"]["max_length"], _number(f["list"]["mean_length"])]
        + [_number(q) for q in f["list"]["length_quantiles"].values()]
        + [_bar_of(f["list"][key][name]) for key in ("empty", "cut") for name in splits]
        for f in features
    ]
    return [note(told), table(head, rows, "Lengths of lists", full=True)]


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
