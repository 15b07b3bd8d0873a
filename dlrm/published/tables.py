"""Figures of runs, beside what the documents published."""

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dlrm.published.results import Record, finished, setting_of
from dlrm.published.rows import DOCUMENTS, RULES, BenchmarkRow, Figure, Rule, catalog, select

SPREAD_LIMIT = 0.05
COLUMNS = (
    *("row", "num_nodes", "devices_per_node", "batch_per_device", "published", "ours", "unit"),
    *("runs", "spread", "speedup", "efficiency", "measured on", "comparison"),
)

_HARMLESS = ("base_device", "load_checkpoint_path", "init_checkpoint", "restore_path")
# A GPU's model, form and memory, as in V100-SXM2-16GB and A100 40GB.
_HARDWARE = re.compile(r"\b([A-Z]\d{2,4}|SXM\d|PCIE|\d+GB)\b")


@dataclass(frozen=True)
class Measured:
    """The figure of the runs of one setting.

    Attributes:
        value: the rule's statistic of `values`.
        values: a value for each run; for a series its mean.
        spread: (largest - smallest) / value; 0 for a single run.
    """

    value: float
    values: tuple[float, ...]
    spread: float

    @property
    def warning(self) -> str:
        """Returns a line about a spread that is too large for comparisons, or an empty string."""
        if self.spread <= SPREAD_LIMIT:
            return ""
        return (
            f"warning: the {len(self.values)} runs differ by {self.spread:.1%}, more than "
            f"{SPREAD_LIMIT:.0%}; the machine may have had other work"
        )


def measured(runs: Sequence[Sequence[float]], rule: Rule) -> Measured:
    """Returns a rule's figure of the values of each run: one, or a series.

    Raises:
        ValueError: a run's series ends before its first value counts.
    """
    if short := [run for run in runs if len(run) <= rule.drop]:
        raise ValueError(
            f"expected more than {rule.drop} logged values in each run, since the first "
            f"{rule.drop} do not count, got {len(short[0])}"
        )
    values = tuple(statistics.fmean(run[rule.drop :]) for run in runs)
    value = statistics.median(values) if rule.statistic == "median" else statistics.fmean(values)
    spread = (max(values) - min(values)) / value if value else 0.0
    return Measured(value, values, spread)


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
        if row := catalog().get(name):
            newest = sorted(groups, key=_rank)[-1]
            found.append(Result(row, newest[-1], figure_of(row, newest)))
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
    if record["gpu"] is None and "--amp" in row.flags and "--amp_dtype=bf16" not in row.flags:
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
    differs += row.differs
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
    if result.speedup is not None and result.place != (1, 1):
        lines.append(f"  speed-up   {result.speedup:.2f}, efficiency {result.efficiency:.1%}")
    lines.append(f"  {comparison(result)}")
    if figure.warning and not record["smoke"]:
        lines.append(f"  {figure.warning}")
    return "\n".join(lines)


def _rows_of(source: str, found: Sequence[Result]) -> list[dict[str, str]]:
    """Returns the cells of `COLUMNS` of each row."""
    by_row: dict[str, list[Result]] = defaultdict(list)
    for result in found:
        by_row[result.row.id].append(result)
    table = []
    for row in select(source):
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


def as_markdown(source: str, found: Sequence[Result]) -> str:
    """Returns a document's table with our columns, as Markdown."""
    table = _rows_of(source, found)
    columns = [name for name in COLUMNS if any(row[name] for row in table)]
    lines = [
        f"# {source}: {DOCUMENTS[source]}",
        "",
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
    ]
    lines += [
        f"| {' | '.join(row[c].replace('|', chr(92) + '|') for c in columns)} |" for row in table
    ]
    return "\n".join(lines) + "\n"
