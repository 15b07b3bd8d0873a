"""Shows runs side by side, and writes the page of a comparison."""

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dlrm.command_line import aligned, say
from dlrm.documents import printable
from dlrm.files import check_replaceable, staged_directory
from dlrm.flags import Values
from dlrm.manifest import write_manifest
from dlrm.metrics.table import TESTED, cost, title
from dlrm.pages import Cell, Section, Sorted, Tile, document, grid, note, table
from dlrm.pages.charts import ChartLine, chart
from dlrm.remote.cache import with_uris
from dlrm.scripts.compare.flags import CompareConfig
from dlrm.train.checkpoints.runs import SavedRun, different_flags, find_runs, left_out, read_run
from dlrm.train.reports.roles import CHOSEN, NEVER_CHOSEN

if TYPE_CHECKING:
    from markupsafe import Markup

HTML, JSON = "comparison.html", "comparison.json"
_KIND = "comparison"  # kind in the manifest of a page
_SPEED = "average_train_throughput"
_MOST_CURVES = 6


def run(values: Values) -> None:
    """Runs the comparison."""
    options = values.config(CompareConfig)
    if options.output:
        check_replaceable(options.output.resolve(), replace=_KIND)
    runs = [read_run(path) for path in find_runs(options.runs)]
    columns = metric_columns(runs)
    runs = _sorted(runs, options.sort, columns)
    print("\n".join(map(printable, lines_of(runs, columns))))
    if note := roles_note(runs, columns):
        say(note, is_prose=True)
    for folder in left_out(options.runs):
        say(f"note: {folder} has a log and no checkpoint, and is left out")
    if options.output:
        facts = [
            {
                "name": r.name,
                "path": with_uris(str(r.path)),
                "step": r.step,
                "best_step": r.best_step,
            }
            | {"flags": r.flags, "metrics": r.metrics, "curve": r.curve, "tests": r.tests}
            | {"roles": r.roles.facts()}
            for r in runs
        ]
        with staged_directory(options.output, replace=_KIND) as directory:
            text = json.dumps({"runs": facts}, indent=1) + "\n"
            (directory / JSON).write_text(text, encoding="utf-8")
            (directory / HTML).write_text(page(runs, columns), encoding="utf-8")
            write_manifest(directory, _KIND)
        say(f"page: {options.output / HTML}")


def metric_columns(runs: Sequence[SavedRun]) -> list[str]:
    """Returns the metrics to show: of the best tests, of rows that report, then the speed."""
    tested = list(dict.fromkeys(name for one in runs for name in one.tested))
    known = {name for one in runs for name in one.metrics}
    reports = dict.fromkeys(one.roles.reports for one in runs if one.roles.reports)
    reported = [f"{rows}_{name}" for rows in reports for name in tested[:2]]
    return [*tested, *(name for name in (*reported, _SPEED) if name in known)]


def roles_note(runs: Sequence[SavedRun], columns: Sequence[str]) -> str | None:
    """Returns a line about the rows that the metrics are of; None if no run was tested."""
    tested = [one for one in runs if one.tested]
    if not tested:
        return None
    chooses = " or ".join(dict.fromkeys(one.roles.chooses for one in tested))
    reports = dict.fromkeys(one.roles.reports for one in tested if one.roles.reports)
    shown = [rows for rows in reports if any(name.startswith(f"{rows}_") for name in columns)]
    never = f"; on {' and '.join(shown)} rows: {NEVER_CHOSEN}" if shown else ""
    return f"metrics of the best test, on {chooses} rows: {CHOSEN}{never}"


def _sorted(runs: list[SavedRun], key: str | None, columns: Sequence[str]) -> list[SavedRun]:
    """Returns runs sorted by a metric, best first, or by a flag; those without it come last."""
    if key is None:
        return runs
    known = {name for one in runs for name in (*one.metrics, *one.flags)}
    if key not in known:
        raise ValueError(f"--sort {key}: expected a metric or a flag, such as {', '.join(columns)}")

    def place(one: SavedRun) -> tuple[Any, ...]:
        value = one.metrics.get(key, one.flags.get(key))
        if isinstance(value, int | float):
            if key in one.flags:
                return 0, value, ""
            return 0, cost(key, value), ""
        return (1, 0, str(value)) if value is not None else (2, 0, "")

    return sorted(runs, key=place)


def lines_of(runs: Sequence[SavedRun], columns: Sequence[str]) -> list[str]:
    """Returns a table with a line per run: its metrics and the flags in which runs differ."""
    return aligned(*_cells(runs, columns))


def _cells(runs: Sequence[SavedRun], columns: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    flags = different_flags(runs)
    heads = ["run", "steps", "best_step", *columns, *(f"--{name}" for name in flags)]
    rows = [
        [one.name, str(one.step), "–" if one.best_step is None else str(one.best_step)]
        + [_number(name, one.metrics.get(name)) for name in columns]
        + [_flag(one.flags.get(name)) for name in flags]
        for one in runs
    ]
    return heads, rows


def _number(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if name == _SPEED else f"{value:.6f}"


def _flag(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def page(runs: Sequence[SavedRun], columns: Sequence[str]) -> str:
    """Returns the page: tiles, the sortable table and the curves."""
    shown = runs[:_MOST_CURVES]
    name = f"Curves of the first {_MOST_CURVES} runs" if len(runs) > len(shown) else "Curves"
    loss, metric = _lines(shown, "loss", "curve"), _tested(shown, columns)
    charts = [chart("Training loss", "step", "loss", loss, _told(shown, "log_loss"))]
    if metric:
        lines, told = _lines(shown, metric, "tests"), _told(shown, metric)
        charts.append(chart(f"{title(metric)} of tests", "step", title(metric), lines, told))
    head = "Press the head of a column to sort by it. Flags that agree are left out."
    roles = roles_note(runs, columns)
    sections = [
        Section("Runs", [note(head), _table(runs, columns)]),
        Section(name, [grid(charts)]),
    ]
    return document(
        "Runs side by side",
        [f"{roles[0].upper()}{roles[1:]}."] if roles else [],
        _tiles(runs, columns),
        sections,
    )


def _tiles(runs: Sequence[SavedRun], columns: Sequence[str]) -> list[Tile]:
    """Returns the number of runs, and the best run with its metrics."""
    tiles = [Tile("runs", f"{len(runs):,}")]
    tested = [one for one in runs if one.tested]
    if not tested:
        return tiles
    first = columns[0]
    best = min(tested, key=lambda one: cost(first, one.metrics.get(first, math.nan)))
    tiles.append(Tile("best run", best.name, f"by {_head(first)}, after {best.best_step} steps"))
    names = [name for name in (*columns[:2], *columns[len(best.tested) :]) if name in best.metrics]
    of_best = "of the best run"
    return tiles + [Tile(_head(name), _short(name, best.metrics[name]), of_best) for name in names]


def _table(runs: Sequence[SavedRun], columns: Sequence[str]) -> "Markup":
    heads, rows = _cells(runs, columns)
    heads = ["run", "steps", "best step", *map(_head, heads[3:])]
    metrics = range(3, 3 + len(columns))
    cells: list[list[Cell]] = [
        [
            Sorted(_short(columns[i - 3], run.metrics.get(columns[i - 3])), text.replace(",", ""))
            if i in metrics
            else text
            for i, text in enumerate(row)
        ]
        for run, row in zip(runs, rows, strict=True)
    ]
    caption = "Metrics, and flags that differ"
    return table([("", heads)], cells, caption, sortable=True)


def _head(name: str) -> str:
    """Returns the title of a column, in words if it is a metric's."""
    if name == _SPEED:
        return "training rows/s"
    metric = next((one for one in TESTED if name.endswith(f"_{one}")), None)
    return f"{title(metric)}, {name.removesuffix(f'_{metric}')}" if metric else title(name)


def _short(name: str, value: float | None) -> str:
    """Returns a metric as the page shows it."""
    return "–" if value is None else f"{value:,.0f}" if name == _SPEED else f"{value:.4f}"


def _tested(runs: Sequence[SavedRun], columns: Sequence[str]) -> str | None:
    """Returns the first metric of any run's tests."""
    return next((n for n in columns if any(n in e for r in runs for e in r.tests)), None)


def _lines(runs: Sequence[SavedRun], name: str, kind: str) -> list[ChartLine]:
    lines = []
    for one in runs:
        entries = [entry for entry in getattr(one, kind) if entry.get(name) is not None]
        lines.append(
            ChartLine(
                one.name,
                [e["step"] for e in entries],
                [e[name] for e in entries],
                dots=kind == "tests",
            )
        )
    return lines


def _told(runs: Sequence[SavedRun], metric: str) -> str:
    return "; ".join(
        f"{one.name}: best test {metric} {_number(metric, one.metrics.get(metric))}" for one in runs
    )
