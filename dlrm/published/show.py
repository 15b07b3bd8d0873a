"""Describes the rows of the catalog as text."""

import shlex
import textwrap
from collections.abc import Iterator, Sequence

from dlrm.published.catalog import DOCUMENTS, select
from dlrm.published.documents.benchmark_row import BenchmarkRow
from dlrm.published.documents.measurement import RULES
from dlrm.published.documents.translation import TranslatedFlag, translate
from dlrm.scripts.commands import program_of

_WIDTH = 100


def table(rows: Sequence[BenchmarkRow]) -> str:
    """Returns one line a row: id, place, published figures."""
    width = max((len(row.id) for row in rows), default=0)
    lines = [
        f"{row.id:<{width}}  {row.source[:3]}  {row.grid:>5}  {_published(row)}".rstrip()
        for row in rows
    ]
    return "\n".join([*lines, f"{len(rows)} rows"])


def _published(row: BenchmarkRow) -> str:
    return ", ".join(map(str, row.published)) or "-"


def command_line(row: BenchmarkRow, dataset: str | None = "DIR") -> str:
    """Returns the command that `run` starts at full size."""
    flags = [*row.arguments(dataset), *RULES[row.rule].flags]
    return f"{_program(row.command, row.processes, row.nodes)} {shlex.join(flags)}"


def _program(command: str, processes: int, nodes: int = 1) -> str:
    """Returns the words before the flags of a command."""
    module = f"dlrm.scripts.{command}"
    if processes == 1:
        return program_of(module)
    several = f"--nnodes {nodes} " if nodes > 1 else ""
    return f"torchrun {several}--nproc_per_node {processes // nodes} -m {module}"


def describe(row: BenchmarkRow) -> str:
    """Returns everything that the catalog has on a row."""
    lines = [row.id, *(_field(name, text) for name, text in _fields(row) if text)]
    if row.printed and row.command in ("cnn", "bert"):
        lines += ["", "  Flags as printed", *map(_flag_line, translate(row.printed).records)]
    return "\n".join(lines)


def _fields(row: BenchmarkRow) -> Iterator[tuple[str, str]]:
    yield "document", f"{row.source}: {DOCUMENTS[row.source[:3]]}"
    yield "quotation", f'"{row.quotation}"'
    yield "published", f"{_published(row)}  ({row.hardware})" if row.published else ""
    yield "printed", row.printed or ""
    if row.measure == "run":
        yield "command", command_line(row)
    else:
        beside = f" beside {row.against}" if row.against else ""
        yield "compares", f"{row.measure} of {row.of}{beside}"
    yield "place", _place(row)
    yield "data", _data(row)
    yield "rule", RULES[row.rule].title
    yield "notes", row.notes
    yield "differs", "; ".join(row.approximated)


def _place(row: BenchmarkRow) -> str:
    processes = "one process" if row.processes == 1 else f"{row.processes} processes"
    machines = "one machine" if row.nodes == 1 else f"{row.nodes} machines"
    return f"{row.grid}: {processes} on {machines}"


def _data(row: BenchmarkRow) -> str:
    if row.data is None:
        return "made by the command"
    if RULES[row.rule].quantity == "metric":
        return f"{row.data}; needs --dataset"
    return f"{row.data}; generated without --dataset"


def _field(name: str, text: str) -> str:
    head = f"  {name:<11}"
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_on_hyphens=False,
        break_long_words=False,
    )


def _flag_line(flag: TranslatedFlag) -> str:
    printed = f"{flag.name} {flag.value}".strip()
    origin = "" if flag.origin == "printed" else f"  ({flag.origin})"
    return f"  {printed:<50} {flag.status:<13} {flag.text}{origin}"


def translation(printed: str) -> str:
    """Returns a printed command line in this package's flags, and how each flag was translated."""
    result = translate(printed)
    line = f"{_program(result.command, result.processes)} {shlex.join(result.flags)}"
    return "\n".join([line, "", *map(_flag_line, result.records)])


_INTRODUCTION = """# The catalog of benchmark rows

Five documents define what this package measures besides its own benchmarks. Each configuration that
they name is a row of the catalog. This page is written from the rows by
`dlrm systems document docs/systems.md`; do not edit it.

```bash
dlrm systems list --source 003
dlrm systems show gaudi/rn50/graph-bf16-b256
dlrm systems run gaudi/rn50/eager-fp32-b128 --smoke
dlrm systems run 'ipu/rn50/infer-synthetic/*' -- --base_device=cpu
dlrm systems scaling dlperf/rn50/fp32-b128/1n1d --grid 1n1d,1n2d
dlrm systems run gaudi/dlrm-medium/trend --smoke
dlrm systems seeds nvidia/dlrm-small/seeds --n 16 --dataset DIR
dlrm systems table 002 --format html --output dlperf.html
```

`run` starts each repeat in fresh processes, with a fixed number of threads each, and appends
one JSON line a run to `systems.jsonl`: the complete setting, the values, losses, times, memory,
versions and the processor, or the error. The same command later runs only what is missing. A
row that needs more devices than the machine has is refused; with `--emulate`, fewer processes
compute the same global batch, which the result says. With `--pipeline` each part of a divided
network has a process. Without `--dataset`, data are generated, and the comparison with the
published figure says so; rows that are measured by a metric need it.

## Rules of measurement

"""


def document() -> str:
    """Returns the page that lists all rows, as Markdown."""
    parts = [_INTRODUCTION, "| rule | |\n|---|---|\n"]
    parts += [f"| {name} | {rule.title} |\n" for name, rule in RULES.items()]
    for source, title in DOCUMENTS.items():
        rows = select(source)
        parts.append(f"\n## {source}: {title} ({len(rows)} rows)\n\n")
        parts.append(
            "| row | place | data | published | rule | reading |\n|---|---|---|---|---|---|\n"
        )
        for row in rows:
            rule = row.rule if row.measure == "run" else row.measure
            notes = "; ".join(filter(None, [row.notes, *row.approximated]))
            cells = (f"`{row.id}`", row.grid, row.data or "made up", _published(row), rule, notes)
            parts.append(f"| {' | '.join(cells)} |\n")
    return "".join(parts)
