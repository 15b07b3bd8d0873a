"""Describes the rows of the catalog as text."""

import shlex
import textwrap
from collections.abc import Iterator, Sequence

from dlrm.published.rows import DOCUMENTS, RULES, BenchmarkRow
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


def command_line(row: BenchmarkRow) -> str:
    """Returns the command that `run` starts at full size."""
    flags = [*row.arguments("DIR"), *RULES[row.rule].flags]
    module = f"dlrm.scripts.{row.command}"
    if row.processes == 1:
        return f"{program_of(module)} {shlex.join(flags)}"
    several = f"--nnodes {row.nodes} " if row.nodes > 1 else ""
    each = row.processes // row.nodes
    return f"torchrun {several}--nproc_per_node {each} -m {module} {shlex.join(flags)}"


def describe(row: BenchmarkRow) -> str:
    """Returns everything that the catalog has on a row."""
    return "\n".join([row.id, *(_field(name, text) for name, text in _fields(row) if text)])


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
    yield "differs", "; ".join(row.differs)


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
