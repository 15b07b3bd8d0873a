"""Figures of runs, beside what the documents published."""

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dlrm.published.results import Record, finished
from dlrm.published.rows import DOCUMENTS, BenchmarkRow, Figure, catalog, select

SPREAD_LIMIT = 0.05
COLUMNS = (
    *("row", "num_nodes", "devices_per_node", "batch_per_device", "published", "ours", "unit"),
    *("runs", "spread", "speedup", "efficiency", "measured on", "comparison"),
)

# What runs have in common to be one figure, and places to be compared.
_OF_PLACES = ("threads", "smoke", "emulated", "pipeline", "data", "torch", "processor")
_SETTING = ("arguments", "processes", *_OF_PLACES)
_HARMLESS = ("base_device", "load_checkpoint_path", "init_checkpoint", "restore_path")
# A GPU's model, form and memory, as in V100-SXM2-16GB and A100 40GB.
_HARDWARE = re.compile(r"\b([A-Z]\d{2,4}|SXM\d|PCIE|\d+GB)\b")


@dataclass(frozen=True)
class Result:
    """The good runs of a row at one place, in one setting.

    Attributes:
        record: a run's setting and machine.
        values: a value for each run; for a series its mean, without what the rule drops.
        speedup: over one device; None where it did not run in the same setting.
        unlike: differences from the setting of the run on one device, if it ran.
    """

    row: BenchmarkRow
    record: Record
    values: tuple[float, ...]
    speedup: float | None = None
    unlike: str = ""

    @property
    def value(self) -> float:
        """The figure: the rule's statistic of all runs."""
        median = self.row.rule.statistic == "median"
        return statistics.median(self.values) if median else statistics.fmean(self.values)

    @property
    def spread(self) -> float:
        """(Largest - smallest) / figure; 0 for a single run."""
        return (max(self.values) - min(self.values)) / self.value if self.value else 0.0

    @property
    def place(self) -> tuple[int, int]:
        """Nodes, and devices in all."""
        return self.record["nodes"], self.record["devices"]

    @property
    def efficiency(self) -> float | None:
        """The speed-up over the number of devices."""
        return None if self.speedup is None else self.speedup / self.place[1]

    @property
    def at_home(self) -> bool:
        """True at the row's own place, to which its published figures belong."""
        return self.place == (self.row.nodes, self.row.processes)


def result_of(row: BenchmarkRow, runs: Sequence[Record]) -> Result:
    """Returns the result of a row's runs in one setting, the newest last.

    Raises:
        ValueError: a run's series ends before its first value counts.
    """
    drop = 0 if runs[-1]["smoke"] else row.rule.drop
    counted = [record["values"][drop:] for record in runs]
    if not all(counted):
        raise ValueError(
            f"expected more than {drop} logged values in each run, since the first {drop} do not "
            "count"
        )
    return Result(row, runs[-1], tuple(map(statistics.fmean, counted)))


def results(records: Iterable[Record]) -> list[Result]:
    """Returns a result of each row and place, with speed-ups where one device ran in its setting.

    If there are several settings, the newest one with the full size and the row's own flags counts,
    otherwise the newest.
    """
    places: dict[tuple[str, str], dict[str, list[Record]]] = defaultdict(dict)
    for record in finished(records):
        settings = places[record["row"], record["label"]]
        key = repr([record.get(name) for name in _SETTING])
        settings[key] = [*settings.pop(key, ()), record]  # the newest last
    families: dict[str, list[Result]] = defaultdict(list)
    for (name, _), settings in places.items():
        if row := catalog().get(name):
            result = result_of(row, max(reversed(settings.values()), key=_rank))
            families[row.id.removesuffix(f"/{row.grid}")].append(result)
    return [scaled for family in families.values() for scaled in _scaled(family)]


def _rank(runs: Sequence[Record]) -> tuple[bool, bool]:
    return not runs[-1]["smoke"], not _changed(runs[-1])


def _changed(record: Record) -> list[str]:
    """Flags after -- that make another measurement: not the device, and not what was trained."""
    return [flag for flag in record["changed"] if not flag.lstrip("-").startswith(_HARMLESS)]


def _scaled(family: Sequence[Result]) -> list[Result]:
    family = sorted(family, key=lambda result: result.place)
    one = family[0]
    if one.place != (1, 1) or one.record["quantity"] != "throughput":
        return family

    def scaled(result: Result) -> Result:
        for key in _OF_PLACES:
            first, other = one.record.get(key), result.record.get(key)
            if other != first:
                unlike = f"no speed-up, as 1n1d ran with {key} {first} and this with {other}"
                return replace(result, unlike=unlike)
        return replace(result, speedup=result.value / one.value)

    return [scaled(result) for result in family]


def comparison(result: Result) -> str:
    """Returns "comparable", or what differs from the document's measurement."""
    row, record = result.row, result.record
    if record["smoke"]:
        return "a smoke run at reduced sizes: nothing to compare"
    differs = []
    if not _same_hardware(row, record):
        there = f", not {row.hardware}" if "not stated" not in row.hardware else ""
        differs.append(f"hardware: {where(record)}{there}")
    if record["gpu"] is None and "--amp" in row.flags and "--amp_dtype=bf16" not in row.flags:
        differs.append("precision: bf16 on a CPU, not fp16")
    if record["emulated"]:
        differs.append(f"{record['devices']} devices emulated by {record['processes']} processes")
    if row.data and record["data"] == "generated":
        differs.append(f"data: generated, not {row.data}")
    if record["changed"]:
        differs.append(f"flags: {' '.join(record['changed'])}")
    if not result.at_home:
        differs.append(f"place: {record['label']}, not {row.grid}")
    if len(result.values) < row.rule.repeats:
        differs.append(f"{len(result.values)} of {row.rule.repeats} runs")
    differs += [*row.differs, *filter(None, [result.unlike])]
    return f"differs in {'; '.join(differs)}" if differs else "comparable"


def where(record: Record) -> str:
    """The hardware of a run."""
    count = record["processes"]
    if record["gpu"]:
        return record["gpu"] if count == 1 else f"{count} x {record['gpu']}"
    threads = count * record["threads"]
    return f"{record['processor']}, {threads} thread{'s' * (threads > 1)}"


def _same_hardware(row: BenchmarkRow, record: Record) -> bool:
    """Returns True if the GPU has the model, form factor and memory that the document names."""
    named = set(_HARDWARE.findall(row.hardware.upper()))
    return bool(named) and named <= set(_HARDWARE.findall((record["gpu"] or "").upper()))


def _ratio(result: Result, figure: Figure) -> float | None:
    """Returns ours over the published figure where both measure the same, else None."""
    same = figure.quantity == result.record["quantity"] and not _changed(result.record)
    return result.value / figure.value if same else None


def summary(result: Result) -> str:
    """Returns a paragraph: measured and published figures, and whether they are comparable."""
    row, record, runs = result.row, result.record, len(result.values)
    spread = f", {row.rule.statistic} of {runs} runs, spread {result.spread:.1%}"
    lines = [
        f"{row.id}  {record['label']}",
        f"  measured   {result.value:.6g} {record['unit']}{spread * (runs > 1)} ({where(record)})",
    ]
    for published in row.published if result.at_home and not record["smoke"] else ():
        times = _ratio(result, published)
        share = f"; ours is {times:.3g} times it" if times is not None else ""
        lines.append(f"  published  {published} ({row.hardware}){share}")
    if result.speedup is not None and result.place != (1, 1):
        lines.append(f"  speed-up   {result.speedup:.2f}, efficiency {result.efficiency:.1%}")
    lines.append(f"  {comparison(result)}")
    if result.spread > SPREAD_LIMIT and not record["smoke"]:
        lines.append(
            f"  warning: the {runs} runs differ by {result.spread:.1%}, more than "
            f"{SPREAD_LIMIT:.0%}; the machine may have had other work"
        )
    return "\n".join(lines)


def as_markdown(source: str, found: Sequence[Result]) -> str:
    """Returns a document's table with our columns, as Markdown."""
    by_row: dict[str, list[Result | None]] = defaultdict(list)
    for result in found:
        by_row[result.row.id].append(result)
    table = [_cells(row, one) for row in select(source) for one in by_row[row.id] or [None]]
    columns = [name for name in COLUMNS if any(cells.get(name) for cells in table)]
    rows = [[cells.get(name, "").replace("|", "\\|") for name in columns] for cells in table]
    heading, *lines = [f"| {' | '.join(row)} |" for row in (columns, *rows)]
    title = f"# {source}: {DOCUMENTS[source]}"
    return "\n".join([title, "", heading, f"|{'---|' * len(columns)}", *lines, ""])


def _cells(row: BenchmarkRow, result: Result | None) -> dict[str, str]:
    """Returns the cells of `COLUMNS` that are not empty."""
    nodes, devices = result.place if result else (row.nodes, row.processes)
    cells = {"row": row.id, "num_nodes": str(nodes), "devices_per_node": str(devices // nodes)}
    if result is None or result.at_home:
        cells["published"] = ", ".join(map(str, row.published))
    if result is None:
        return cells
    record = result.record
    if result.speedup is not None:
        cells["speedup"] = f"{result.speedup:.2f}"
        cells["efficiency"] = f"{result.efficiency:.1%}"
    return cells | {
        "batch_per_device": str(record["batch_per_device"]),
        "ours": f"{result.value:.6g}",
        "unit": record["unit"],
        "runs": str(len(result.values)),
        "spread": f"{result.spread:.1%}",
        "measured on": str(record["gpu"] or record["processor"]),
        "comparison": comparison(result),
    }
