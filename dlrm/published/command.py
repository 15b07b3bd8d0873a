"""Lists, runs and compares the benchmark rows of the five source documents.

dlrm systems list --source 003
dlrm systems show gaudi/rn50/graph-bf16-b256
dlrm systems run dlperf/rn50/fp32-b128/1n1d --grid 1n1d,1n2d
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import fnmatch
import shlex
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dlrm.command_line import say_error, show
from dlrm.files import errors_named
from dlrm.flags import ConfigFlags, UsageError, Values, run_command
from dlrm.published import compared, results, tables
from dlrm.published.jobs import RunOptions, plan_jobs
from dlrm.published.rows import DOCUMENTS, BenchmarkRow, catalog, find, select
from dlrm.published.runner import Records, run_job
from dlrm.scripts.commands import program_of
from dlrm.settings import REQUIRED, setting

_LINES = textwrap.TextWrapper(
    100, subsequent_indent=" " * 13, break_on_hyphens=False, break_long_words=False
)


@dataclass(frozen=True)
class ListConfig:
    """The rows to list."""

    source: str | None = setting(None, "document: " + ", ".join(DOCUMENTS))
    model: str | None = setting(None, "model, such as resnet50, bert-large or dlrm")


@dataclass(frozen=True)
class RowConfig:
    """One row."""

    row: str = setting(REQUIRED, "id of a row", positional=True)


@dataclass(frozen=True)
class RowsConfig:
    """Some rows, and what their runs write."""

    rows: tuple[str, ...] = setting(
        REQUIRED, "ids of rows, or patterns such as 'gaudi/*'", positional=True
    )
    keep: Path | None = setting(None, "directory in which to keep the runs' logs and checkpoints")


@dataclass(frozen=True)
class ResultsConfig:
    """The file of results."""

    results: Path = setting(
        Path("systems.jsonl"), "file of results, in which finished runs are not repeated"
    )


@dataclass(frozen=True)
class TableConfig:
    """A table, and where it is written."""

    document: str = setting(REQUIRED, ", ".join(DOCUMENTS), positional=True)
    output: str | None = setting(None, "file to write; default: print the table")


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code: 0, 1 for a failed run or check, 2."""
    own, flags = sys.argv[1:] if arguments is None else arguments, []
    if "--" in own:
        cut = own.index("--")
        own, flags = own[:cut], own[cut + 1 :]
    task = own[0] if own and own[0] in TASKS else ""
    if not task:
        return run_command(ConfigFlags([("", TaskConfig)]), _refuse, __doc__, own, usage=2)
    act, meaning, configs = TASKS[task]

    def run(values: Values) -> int:
        if flags and task != "run":
            raise UsageError("only `run` takes flags after --")
        try:
            return act(values.replaced({"flags": tuple(flags)}))
        except ChildProcessError as error:  # a run that a comparison needs
            return say_error(error, 1)

    line = ConfigFlags([("Flags", one) for one in configs])
    doc = f"{__doc__}\n{task}: {meaning}"
    hint = "the same command runs what is missing"
    return run_command(line, run, doc, own[1:], code=2, hint=hint)


def _refuse(options: Values) -> int:
    raise UsageError(f"expected one of {', '.join(TASKS)}, got {options['task']}")


def _list(options: Values) -> int:
    rows = select(options["source"], options["model"])
    width = max((len(row.id) for row in rows), default=0)
    lines = [
        f"{row.id:<{width}}  {row.source}  {row.grid:>5}  {_figures(row) or '-'}" for row in rows
    ]
    show("\n".join([*lines, f"{len(rows)} rows"]))
    return 0


def _figures(row: BenchmarkRow) -> str:
    return ", ".join(map(str, row.published))


def _show(options: Values) -> int:
    row = find(options["row"])
    beside = f" beside {row.against}" if row.against else ""
    data = "needs --dataset" if row.rule.quantity == "metric" else "generated without --dataset"
    processes = "one process" if row.processes == 1 else f"{row.processes} processes"
    machines = "one machine" if row.nodes == 1 else f"{row.nodes} machines"
    fields = {
        "document": f"{row.source}: {DOCUMENTS[row.source]}",
        "quotation": f'"{row.quotation}"',
        "published": row.published and f"{_figures(row)}  ({row.hardware})",
        "printed": row.printed,
        "command": row.measure == "run" and _command_line(row),
        "compares": row.measure != "run" and f"{row.measure} of {row.of}{beside}",
        "place": f"{row.grid}: {processes} on {machines}",
        "data": f"{row.data}; {data}" if row.data else "made by the command",
        "rule": row.rule.title,
        "notes": row.notes,
        "differs": "; ".join(row.differs),
    }
    lines = [_LINES.fill(f"  {name:<11}{text}") for name, text in fields.items() if text]
    show("\n".join([row.id, *lines]))
    return 0


def _command_line(row: BenchmarkRow) -> str:
    """Returns the command that `run` starts at full size."""
    flags = shlex.join([*row.arguments("DIR"), *row.rule.flags])
    module = f"dlrm.scripts.{row.command}"
    if row.processes == 1:
        return f"{program_of(module)} {flags}"
    several = f"--nnodes {row.nodes} " if row.nodes > 1 else ""
    each = row.processes // row.nodes
    return f"torchrun {several}--nproc_per_node {each} -m {module} {flags}"


def _run(options: Values) -> int:
    chosen = [row for name in options["rows"] for row in _matching(name)]
    asked, to = options.config(RunOptions), Records(options["results"], options["keep"])
    failed = passed = 0
    with results.claimed(to.path):
        for row in chosen:
            try:
                failed += _run_row(row, asked, to)
            except (ValueError, OSError) as error:
                if len(chosen) == 1:
                    raise
                print(f"passed over: {error}")
                passed += 1
    if failed:
        print(
            f"error: {failed} run{'s' * (failed > 1)} failed, with the errors in {to.path}; "
            "the same command runs what is missing",
            file=sys.stderr,
        )
    return 1 if failed or passed else 0


def _run_row(row: BenchmarkRow, asked: RunOptions, to: Records) -> int:
    """Runs a row and prints its figures; returns the number of failed runs or checks."""
    if row.measure == "trend":
        return 0 if compared.trend(row, asked, to) else 1
    if row.measure == "seeds":
        for line in compared.seeds(row, asked, to):
            print(line)
        print("smoke runs at reduced sizes: nothing to compare" if asked.smoke else _published(row))
        return 0
    if row.measure == "scaling":
        asked = replace(asked, grid=asked.grid or ("1n1d", row.grid))
    jobs = plan_jobs(find(row.of) if row.of else row, asked)
    good, failed = [], 0
    for job in jobs:
        found = results.finished(run_job(job, to))[: job.repeats]
        failed += job.repeats - len(found)
        good += found
    for result in tables.results(good):
        print(tables.summary(result))
    if row.measure == "scaling":
        print(_published(row))
    return failed


def _published(row: BenchmarkRow) -> str:
    return f"published: {_figures(row)} ({row.hardware})"


def _table(options: Values) -> int:
    document, output = options["document"], options["output"]
    if document not in DOCUMENTS:
        raise ValueError(f"{document}: expected a document of {', '.join(DOCUMENTS)}")
    found = tables.results(results.read(options["results"]))
    found = [result for result in found if result.row.source == document]
    text = tables.as_markdown(document, found)
    if output is None:
        show(text.rstrip("\n"))
        return 0
    with errors_named(output):
        Path(output).write_text(text)
    print(f"{output}: {len(select(document))} rows, {len(found)} results")
    return 0


def _matching(name: str) -> list[BenchmarkRow]:
    """Returns the row of a name, or all rows of a pattern."""
    return [catalog()[key] for key in fnmatch.filter(catalog(), name)] or [find(name)]


_Task = tuple[Callable[[Values], int], str, Sequence[type]]
TASKS: dict[str, _Task] = {
    "list": (_list, "list rows, one a line", (ListConfig,)),
    "show": (_show, "show everything known of a row", (RowConfig,)),
    "run": (
        _run,
        "run rows by the rule of their document",
        (RowsConfig, RunOptions, ResultsConfig),
    ),
    "table": (
        _table,
        "print a document's table with what was measured here",
        (TableConfig, ResultsConfig),
    ),
}


@dataclass(frozen=True)
class TaskConfig:
    """The task, whose flags its own help shows."""

    task: str = setting(
        REQUIRED,
        "one of\n" + "\n".join(f"    {task}: {own[1]}" for task, own in TASKS.items()),
        positional=True,
    )


if __name__ == "__main__":
    sys.exit(main())
