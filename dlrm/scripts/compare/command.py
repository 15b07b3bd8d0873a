"""Shows runs side by side, and writes the page of a comparison."""

import html
import json
from collections.abc import Sequence
from typing import Any

from dlrm.command_line import aligned, say
from dlrm.documents import printable
from dlrm.files import check_replaceable, staged_directory
from dlrm.manifest import write_manifest
from dlrm.metrics.table import cost
from dlrm.pages import Line, chart, document, scrolled
from dlrm.scripts.compare.flags import CompareConfig
from dlrm.train.checkpoints.runs import Run, different_flags, find_runs, left_out, read_run
from dlrm.train.reports.roles import CHOSEN, NEVER_CHOSEN

HTML, JSON = "comparison.html", "comparison.json"
_KIND = "comparison"  # kind in the manifest of a page
_SPEED = "average_train_throughput"
_MOST_CURVES = 6
# Sorts the rows of the table by the column whose head is clicked.
_SORT = """<script>
document.querySelectorAll('th button').forEach((button, column) => button.onclick = () => {
  const table = button.closest('table'), head = button.closest('th');
  const up = head.getAttribute('aria-sort') !== 'ascending';
  table.querySelectorAll('th').forEach(th => th.removeAttribute('aria-sort'));
  head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
  const key = row => { const text = row.cells[column].dataset.value;
    return isNaN(parseFloat(text)) ? text : parseFloat(text); };
  [...table.tBodies[0].rows].sort((a, b) => (key(a) > key(b) ? 1 : -1) * (up ? 1 : -1))
    .forEach(row => table.tBodies[0].append(row));
});
</script>"""


def run(options: CompareConfig) -> None:
    """Runs the comparison.

    Raises:
        ValueError, OSError: an error that the user can fix.
    """
    if options.output:
        check_replaceable(options.output.resolve(), replace=_KIND)
    runs = [read_run(path) for path in find_runs(options.runs)]
    columns = metric_columns(runs)
    runs = _sorted(runs, options.sort, columns)
    print("\n".join(map(printable, lines_of(runs, columns))))
    if note := roles_note(runs, columns):
        say(note)
    for folder in left_out(options.runs):
        say(f"note: {folder} has a log and no checkpoint, and is left out")
    if options.output:
        facts = [
            {"name": r.name, "path": str(r.path), "step": r.step, "best_step": r.best_step}
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


def metric_columns(runs: Sequence[Run]) -> list[str]:
    """Returns the metrics to show: of the best tests, of rows that report, then the speed."""
    tested = list(dict.fromkeys(name for one in runs for name in one.tested))
    known = {name for one in runs for name in one.metrics}
    reports = dict.fromkeys(one.roles.reports for one in runs if one.roles.reports)
    reported = [f"{rows}_{name}" for rows in reports for name in tested[:2]]
    return [*tested, *(name for name in (*reported, _SPEED) if name in known)]


def roles_note(runs: Sequence[Run], columns: Sequence[str]) -> str | None:
    """Returns a line about the rows that the metrics are of; None if no run was tested."""
    tested = [one for one in runs if one.tested]
    if not tested:
        return None
    chooses = " or ".join(dict.fromkeys(one.roles.chooses for one in tested))
    reports = dict.fromkeys(one.roles.reports for one in tested if one.roles.reports)
    shown = [rows for rows in reports if any(name.startswith(f"{rows}_") for name in columns)]
    never = f"; {' and '.join(f'{rows}_*' for rows in shown)}: {NEVER_CHOSEN}" if shown else ""
    return f"{tested[0].tested[0]} and others of the best test, on {chooses} rows: {CHOSEN}{never}"


def _sorted(runs: list[Run], key: str | None, columns: Sequence[str]) -> list[Run]:
    """Returns runs sorted by a metric, best first, or by a flag; those without it come last."""
    if key is None:
        return runs
    known = {name for one in runs for name in (*one.metrics, *one.flags)}
    if key not in known:
        raise ValueError(f"--sort {key}: expected a metric or a flag, such as {', '.join(columns)}")

    def place(one: Run) -> tuple[Any, ...]:
        value = one.metrics.get(key, one.flags.get(key))
        if isinstance(value, int | float):
            if key in one.flags:
                return 0, value, ""
            return 0, cost(key, value), ""
        return (1, 0, str(value)) if value is not None else (2, 0, "")

    return sorted(runs, key=place)


def lines_of(runs: Sequence[Run], columns: Sequence[str]) -> list[str]:
    """Returns a table with a line per run: its metrics and the flags in which runs differ."""
    return aligned(*_cells(runs, columns))


def _cells(runs: Sequence[Run], columns: Sequence[str]) -> tuple[list[str], list[list[str]]]:
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


def page(runs: Sequence[Run], columns: Sequence[str]) -> str:
    """Returns the page: the sortable table and the curves."""
    heads, rows = _cells(runs, columns)
    head = "".join(f"<th scope='col'><button>{html.escape(name)}</button></th>" for name in heads)
    body = "".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    shown = runs[:_MOST_CURVES]
    note = f" of the first {_MOST_CURVES} runs" if len(runs) > len(shown) else ""
    loss, metric = _lines(shown, "loss", "curve"), _tested(shown, columns)
    told = roles_note(runs, columns)
    parts = [
        "<p class='note'>Press the head of a column to sort by it. "
        "Flags that agree are left out.</p>",
        scrolled(table, "runs, their metrics, and the flags in which they differ"),
        *([f"<p class='note'>{html.escape(told)}.</p>"] if told else []),
        f"<h2>Curves{note}</h2>",
        chart("Training loss", "step", "loss", loss, _told(shown, "log_loss")),
    ]
    if metric:
        lines = _lines(shown, metric, "tests")
        parts.append(chart(f"Test {metric}", "step", metric, lines, _told(shown, metric)))
    return document("Runs side by side", [*parts, _SORT])


def _tested(runs: Sequence[Run], columns: Sequence[str]) -> str | None:
    """Returns the first metric of any run's tests."""
    return next((n for n in columns if any(n in e for r in runs for e in r.tests)), None)


def _cell(text: str) -> str:
    value = html.escape(text.replace(",", ""), quote=True)
    return f"<td data-value='{value}'>{html.escape(text)}</td>"


def _lines(runs: Sequence[Run], name: str, kind: str) -> list[Line]:
    lines = []
    for one in runs:
        entries = [entry for entry in getattr(one, kind) if entry.get(name) is not None]
        lines.append(
            Line(
                one.name,
                [e["step"] for e in entries],
                [e[name] for e in entries],
                dots=kind == "tests",
            )
        )
    return lines


def _told(runs: Sequence[Run], metric: str) -> str:
    return "; ".join(
        f"{one.name}: best test {metric} {_number(metric, one.metrics.get(metric))}" for one in runs
    )
