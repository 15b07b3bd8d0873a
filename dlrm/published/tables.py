"""Tables of results beside what the documents published: Markdown, CSV and HTML."""

import csv
import io
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dlrm import pages
from dlrm.pages import Section, Tile
from dlrm.pages.charts import ChartLine, chart
from dlrm.published.catalog import CATALOG, DOCUMENTS
from dlrm.published.documents.benchmark_row import BenchmarkRow, Figure
from dlrm.published.documents.measurement import RULES, Measured, measured
from dlrm.published.results import Record, finished, setting_of

if TYPE_CHECKING:
    from markupsafe import Markup

COLUMNS = (
    *("row", "num_nodes", "devices_per_node", "batch_per_device", "published", "ours", "unit"),
    *("runs", "spread", "speedup", "efficiency", "measured on", "comparison"),
)

_HARMLESS = ("base_device", "load_checkpoint_path", "init_checkpoint", "restore_path")
# A GPU's model, form and memory, as in V100-SXM2-16GB and A100 40GB.
_HARDWARE = re.compile(r"\b([A-Z]\d{2,4}|SXM\d|PCIE|\d+GB)\b")


@dataclass(frozen=True)
class Result:
    """All good runs of a row at one place, in one setting.

    Attributes:
        record: a run's setting and machine.
        figure: the rule's figure of all runs.
        speedup: over one device; None where it did not run in the same setting.
        unlike: differences from the setting of the run on one device, if it ran.
    """

    row: BenchmarkRow
    record: Record
    figure: Measured
    speedup: float | None = None
    unlike: str = ""

    @property
    def place(self) -> tuple[int, int]:
        return self.record["nodes"], self.record["devices"]

    @property
    def unit(self) -> str:
        return self.record["unit"]

    @property
    def efficiency(self) -> float | None:
        return None if self.speedup is None else self.speedup / self.place[1]


def results(records: Iterable[Record]) -> list[Result]:
    """Returns a result of each row and place, with speed-ups where one device ran in its setting.

    If there are several settings, the newest one with the full size and the row's own flags counts,
    otherwise the newest.
    """
    settings: dict[tuple[str, str], list[list[Record]]] = defaultdict(list)
    for record in finished(records):
        groups = settings[record["row"], record["label"]]
        same = [group for group in groups if setting_of(group[-1]) == setting_of(record)]
        group = same[0] if same else []
        groups[:] = [g for g in groups if g is not group]
        groups.append([*group, record])
    found = []
    for (name, _), groups in settings.items():
        if name in CATALOG:
            newest = sorted(groups, key=_rank)[-1]
            found.append(Result(CATALOG[name], newest[-1], figure_of(CATALOG[name], newest)))
    by_family: dict[str, list[Result]] = defaultdict(list)
    for result in found:
        by_family[_family(result.row)].append(result)
    return [scaled for family in by_family.values() for scaled in _scaled(family)]


def _rank(group: Sequence[Record]) -> tuple[bool, bool]:
    return not group[-1]["smoke"], not _changed(group[-1])


def _changed(record: Record) -> list[str]:
    """Flags after -- that make another measurement: not the device, and not what was trained."""
    return [flag for flag in record["changed"] if not flag.lstrip("-").startswith(_HARMLESS)]


def figure_of(row: BenchmarkRow, group: Sequence[Record]) -> Measured:
    """Returns the figure of runs of one setting by their row's rule."""
    rule = RULES[row.rule]
    rule = replace(rule, drop=0) if group[-1]["smoke"] else rule
    return measured([record["values"] for record in group], rule)


def _family(row: BenchmarkRow) -> str:
    """Returns the family of a row: its rows differ in their places only."""
    head, _, last = row.id.rpartition("/")
    return head if last == row.grid else row.id


def _scaled(family: Sequence[Result]) -> list[Result]:
    family = sorted(family, key=lambda result: result.place)
    one = family[0]
    if one.place != (1, 1) or one.record["quantity"] != "throughput":
        return family
    first = setting_of(one.record, ("arguments", "processes"))

    def scaled(result: Result) -> Result:
        other = setting_of(result.record, ("arguments", "processes"))
        for key, value in first.items():
            if other[key] != value:
                unlike = f"no speed-up, as 1n1d ran with {key} {value} and this with {other[key]}"
                return replace(result, unlike=unlike)
        return replace(result, speedup=result.figure.value / one.figure.value)

    return [scaled(result) for result in family]


def comparison(result: Result) -> str:
    """Returns "comparable", or what differs from the document's measurement."""
    row, record = result.row, result.record
    if record["smoke"]:
        return "a smoke run at reduced sizes: nothing to compare"
    differs = []
    if not _same_hardware(row, record):
        where = _where(record)
        there = f", not {row.hardware}" if "not stated" not in row.hardware else ""
        differs.append(f"hardware: {where}{there}")
    if record["gpu"] is None and ("--amp" in row.flags or "--precision=fp16" in row.flags):
        differs.append("precision: bf16 on a CPU, not fp16")
    if record["emulated"]:
        differs.append(f"{record['devices']} devices emulated by {record['processes']} processes")
    if row.data and record["data"] == "generated":
        differs.append(f"data: generated, not {row.data}")
    if record["changed"]:
        differs.append(f"flags: {' '.join(record['changed'])}")
    if not _at_home(result):
        differs.append(f"place: {record['label']}, not {row.grid}")
    runs, repeats = len(result.figure.values), RULES[row.rule].repeats
    if runs < repeats:
        differs.append(f"{runs} of {repeats} runs")
    differs += row.approximated
    differs += [result.unlike] if result.unlike else []
    return f"differs in {'; '.join(differs)}" if differs else "comparable"


def _where(record: Record) -> str:
    """The hardware of a run."""
    count = record["processes"]
    if record["gpu"]:
        return record["gpu"] if count == 1 else f"{count} x {record['gpu']}"
    threads = count * record["threads"]
    return f"{record['processor']}, {threads} thread{'s' * (threads > 1)}"


def _at_home(result: Result) -> bool:
    """Returns True if the place is the row's own, to which its published figures belong."""
    return result.place == (result.row.nodes, result.row.processes)


def _same_hardware(row: BenchmarkRow, record: Record) -> bool:
    """Returns True if the GPU has the model, form factor and memory that the document names."""
    named = set(_HARDWARE.findall(row.hardware.upper()))
    return bool(named) and named <= set(_HARDWARE.findall((record["gpu"] or "").upper()))


def ratio(result: Result, figure: Figure) -> float | None:
    """Returns ours over the published figure where both measure the same, else None."""
    same = figure.quantity == result.record["quantity"] and _at_home(result)
    if not same or result.record["smoke"] or _changed(result.record):
        return None
    return result.figure.value / figure.value


def summary(result: Result) -> str:
    """Returns a paragraph: measured and published figures, and whether they are comparable."""
    row, record, figure = result.row, result.record, result.figure
    runs = len(figure.values)
    kind = RULES[row.rule].statistic
    spread = f", {kind} of {runs} runs, spread {figure.spread:.1%}" if runs > 1 else ""
    lines = [
        f"{row.id}  {record['label']}",
        f"  measured   {figure.value:.6g} {result.unit}{spread} ({_where(record)})",
    ]
    for published in row.published if _at_home(result) and not record["smoke"] else ():
        times = ratio(result, published)
        share = f"; ours is {times:.3g} times it" if times is not None else ""
        lines.append(f"  published  {published} ({row.hardware}){share}")
    lines.append(f"  {comparison(result)}")
    if figure.warning and not record["smoke"]:
        lines.append(f"  {figure.warning}")
    return "\n".join(lines)


def rows_of(source: str, found: Sequence[Result]) -> list[dict[str, str]]:
    """Returns a document's table with our columns: a dict of `COLUMNS` a row of the catalog."""
    by_row: dict[str, list[Result]] = defaultdict(list)
    for result in found:
        by_row[result.row.id].append(result)
    table = []
    for row in CATALOG.values():
        if not row.source.startswith(source):
            continue
        table += [_cells(row, result) for result in by_row.get(row.id, [None])]
    return table


def _cells(row: BenchmarkRow, result: Result | None) -> dict[str, str]:
    cells = dict.fromkeys(COLUMNS, "")
    cells["row"] = row.id
    cells["published"] = ", ".join(map(str, row.published))
    cells["num_nodes"] = str(row.nodes)
    cells["devices_per_node"] = str(row.processes // row.nodes)
    if result is None:
        return cells
    nodes, devices = result.place
    return cells | {
        "num_nodes": str(nodes),
        "devices_per_node": str(devices // nodes),
        "published": cells["published"] if _at_home(result) else "",
        "batch_per_device": str(result.record["batch_per_device"]),
        "ours": f"{result.figure.value:.6g}",
        "unit": result.unit,
        "runs": str(len(result.figure.values)),
        "spread": f"{result.figure.spread:.1%}",
        "speedup": "" if result.speedup is None else f"{result.speedup:.2f}",
        "efficiency": "" if result.efficiency is None else f"{result.efficiency:.1%}",
        "measured on": str(result.record["gpu"] or result.record["processor"]),
        "comparison": comparison(result),
    }


def as_markdown(title: str, table: Sequence[dict[str, str]]) -> str:
    """Returns a Markdown table."""
    columns = _used(table)
    lines = [f"# {title}", "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [
        f"| {' | '.join(row[c].replace('|', chr(92) + '|') for c in columns)} |" for row in table
    ]
    return "\n".join(lines) + "\n"


def as_csv(table: Sequence[dict[str, str]]) -> str:
    """Returns the table with a header line, as a spreadsheet reads it."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def as_html(title: str, table: Sequence[dict[str, str]], found: Sequence[Result]) -> str:
    """Returns one page that needs no other file: charts of what scales, and the table."""
    columns = _used(table)
    rows = [[row[name] for name in columns] for row in table]
    sections = [Section("Rows", [pages.table([("", columns)], rows, title, full=True)])]
    if charts := [_chart(*one) for one in _curves(found).items()]:
        sections.insert(0, Section("Efficiency by devices", [pages.grid(charts)]))
    tiles = [Tile("rows", str(len(table))), Tile("measured", str(len(found)))]
    return pages.document(title, [], tiles, sections)


def _chart(family: str, curves: dict[str, list[tuple[int, float]]]) -> "Markup":
    """Returns a chart of the throughput of a device, over that with the fewest devices."""
    lines = []
    for name, points in curves.items():
        devices, values = zip(*sorted(points), strict=True)
        shares = [v / d * devices[0] / values[0] for d, v in zip(devices, values, strict=True)]
        lines.append(ChartLine(name, devices, shares, dots=True))
    told = f"Throughput of a device, over that with the fewest devices: {', '.join(curves)}"
    return chart(family, "devices", "efficiency", lines, told)


def _curves(found: Sequence[Result]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Returns throughput by devices of each family that ran at several places, ours and others."""
    lines: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for result in found:
        record = result.record
        measures = record["quantity"] == "throughput" and not record["emulated"]
        if measures and not record["smoke"] and not _changed(record):
            family = lines.setdefault(_family(result.row), {})
            family.setdefault("ours", []).append((result.place[1], result.figure.value))
    for row in CATALOG.values():
        if (curves := lines.get(_family(row))) is not None:
            for published in row.published:
                if published.quantity == "throughput":
                    points = curves.setdefault(published.system or "published", [])
                    points.append((row.processes, published.value))
    several = {f: {n: p for n, p in one.items() if len(p) > 1} for f, one in lines.items()}
    return {family: curves for family, curves in several.items() if "ours" in curves}


def title_of(source: str) -> str:
    """Returns the heading of a document's table."""
    return f"{source}: {DOCUMENTS[source]}"


def dlperf_report(found: Sequence[Result]) -> str:
    """Returns a report in the shape of DLPerf's: environment, final result, all results."""
    record = found[0].record
    lines = [
        "## Environment",
        f"- GPU: {record['gpu'] or 'none'}",
        *(f"- {name}: {record[name]}" for name in ("processor", "cores", "threads")),
        *(f"- {name}: {record[name]}" for name in ("torch", "python", "dlrm", "revision")),
        "",
        "## Final result",
        "| num_nodes | devices_per_node | batch_per_device | throughput | speedup | efficiency |",
        "|---|---|---|---|---|---|",
    ]
    for result in found:
        nodes, devices = result.place
        rise, efficiency = (
            ("", "")
            if result.speedup is None
            else (f"{result.speedup:.2f}", f"{result.efficiency:.1%}")
        )
        lines.append(
            f"| {nodes} | {devices // nodes} | {result.record['batch_per_device']} | "
            f"{result.figure.value:.2f} | {rise} | {efficiency} |"
        )
    lines += ["", "## All results", "| place | throughput of each run | spread |", "|---|---|---|"]
    for result in found:
        values = ", ".join(f"{value:.2f}" for value in result.figure.values)
        lines.append(f"| {result.record['label']} | {values} | {result.figure.spread:.1%} |")
    return "\n".join(lines)


def _used(table: Sequence[dict[str, str]]) -> list[str]:
    return [name for name in COLUMNS if any(row[name] for row in table)]
