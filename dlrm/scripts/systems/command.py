"""Lists, runs and compares the benchmark rows of the five source documents.

python -m dlrm.scripts.systems list --source 003
python -m dlrm.scripts.systems show gaudi/rn50/graph-bf16-b256
python -m dlrm.scripts.systems run dlperf/rn50/fp32-b128/1n1d --grid 1n1d,1n2d
"""

import dlrm.scripts.common.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import argparse
import fnmatch
import os
import sys
from collections.abc import Callable
from pathlib import Path

from dlrm.scripts.systems import compare, show, tables
from dlrm.scripts.systems.jobs import Options, plan
from dlrm.scripts.systems.results import read
from dlrm.scripts.systems.runner import run
from dlrm.systems.catalogue import CATALOGUE, DOCUMENTS, select
from dlrm.systems.measurement import RULES
from dlrm.systems.rows import System, find

_RESULTS = "systems.jsonl"


def main(arguments: list[str]) -> int:
    """Does what a command line says; returns the exit code: 0, 1 for a failed run or check, 2."""
    own, flags = arguments, []
    if "--" in arguments:
        cut = arguments.index("--")
        own, flags = arguments[:cut], arguments[cut + 1 :]
    options = _parser().parse_args(own)
    options.flags = tuple(flags)
    try:
        return options.act(options)
    except BrokenPipeError:  # whoever reads has enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # until the process ends
        return 0
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
    except compare.FailedRunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command runs what is missing", file=sys.stderr)
        return 130
    return 2


def _list(options: argparse.Namespace) -> int:
    print(show.table(select(options.source, options.model)))
    return 0


def _show(options: argparse.Namespace) -> int:
    print(show.describe(find(CATALOGUE, options.row)))
    return 0


def _translate(options: argparse.Namespace) -> int:
    print(show.translation(options.command))
    return 0


def _run(options: argparse.Namespace) -> int:
    chosen = [row for name in options.rows for row in _matching(name)]
    alone = [row for row in chosen if row.measure != "run"]
    if alone and len(chosen) == 1:
        return _compared(alone[0], options)
    jobs = [job for row in chosen if row.measure == "run" for job in plan(row, _options(options))]
    failed = 0
    for job in jobs:
        records = run(job, options.results, options.keep)
        latest = [r for r in records if r["exit_code"] == 0][-job.repeats :]
        failed += job.repeats - len(latest)
        for result in tables.results(latest):
            print(tables.summary(result))
    for row in alone:
        print(f"{row.id}: compares runs; `run` it by itself, or see `{row.measure}`")
    if failed:
        print(
            f"error: {failed} runs failed, with their errors in {options.results}; the same "
            "command runs what is missing",
            file=sys.stderr,
        )
    return 1 if failed else 0


def _compared(row: System, options: argparse.Namespace) -> int:
    """Runs a row that compares runs of others."""
    if row.measure == "trend":
        options.row, options.against, options.bound, options.change = row.of, row.against, None, ()
        options.steps = 20 if options.smoke else 500
        return _trend(options)
    if row.measure == "seeds":
        options.row, options.n, options.first = row.id, 2 if options.smoke else 16, 8
        return _seeds(options)
    options.row, options.grid = row.of, options.grid or ("1n1d", row.grid)
    return _scaling(options)


def _trend(options: argparse.Namespace) -> int:
    row, against = (find(CATALOGUE, name) for name in (options.row, options.against))
    follows = compare.trend(
        row,
        against,
        options.steps,
        options.bound,
        options.change,
        _options(options),
        options.results,
        options.keep,
        print,
    )
    return 0 if follows else 1


def _seeds(options: argparse.Namespace) -> int:
    row = find(CATALOGUE, options.row)
    columns = [(RULES[row.rule].quantity, row)]
    if row.measure == "seeds":
        pair = [find(CATALOGUE, name) for name in (row.of, row.against) if name]
        names = [f"{figure.system} AUC" for figure in row.published]
        columns = list(zip(names, pair, strict=True))
    numbers = range(options.first, options.first + options.n)
    print(
        compare.seeds(
            columns, numbers, _options(options), options.results, options.keep, _to_stderr
        )
    )
    return 0


def _scaling(options: argparse.Namespace) -> int:
    row = find(CATALOGUE, options.row)
    jobs, _, _ = compare.scaled(row, _options(options), options.results, options.keep, print)
    keys = [(job.row.id, job.label) for job in jobs]
    ran = [r for r in read(options.results) if (r["row"], r["label"]) in keys]
    found = tables.results(ran)
    print(tables.dlperf_report(found))
    for result in found:
        print(tables.comparison(result))
    published = [figure for figure in row.published if figure.quantity == "scaling"]
    for figure in published:
        print(f"published: {figure} on {row.hardware}")
    return 0


def _table(options: argparse.Namespace) -> int:
    if options.document not in DOCUMENTS:
        raise ValueError(f"{options.document}: expected a document of {', '.join(DOCUMENTS)}")
    known = [r for r in read(options.results) if CATALOGUE.get(r["row"])]
    found = [r for r in tables.results(known) if r.row.source.startswith(options.document)]
    table, title = tables.rows_of(options.document, found), tables.title_of(options.document)
    writers: dict[str, Callable[[], str]] = {
        "markdown": lambda: tables.as_markdown(title, table),
        "csv": lambda: tables.as_csv(table),
        "html": lambda: tables.as_html(title, table, found),
    }
    text = writers[options.format]()
    if options.output:
        Path(options.output).write_text(text)
        print(f"{options.output}: {len(table)} rows, {len(found)} of them measured")
    else:
        print(text, end="")
    return 0


def _document(options: argparse.Namespace) -> int:
    Path(options.output).write_text(show.document())
    print(f"{options.output}: {len(CATALOGUE)} rows")
    return 0


def _matching(name: str) -> list[System]:
    """The row of a name, or all rows of a pattern."""
    if any(character in name for character in "*?["):
        rows = [row for key, row in CATALOGUE.items() if fnmatch.fnmatchcase(key, name)]
        if not rows:
            raise ValueError(f"{name}: no row matches it; `list` shows all")
        return rows
    return [find(CATALOGUE, name)]


def _options(options: argparse.Namespace) -> Options:
    return Options(
        dataset=options.dataset,
        smoke=options.smoke,
        emulate=options.emulate,
        pipeline=options.pipeline,
        grid=options.grid,
        repeats=options.repeats,
        threads=options.threads,
        flags=options.flags,
    )


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def _grid(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {number}")
    return number


def _parser() -> argparse.ArgumentParser:
    summary, _, usage = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m dlrm.scripts.systems",
        description=f"{summary}\n\n{usage}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, act: Callable[[argparse.Namespace], int], text: str):
        made = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        made.set_defaults(act=act)
        return made

    listing = command("list", _list, "list rows, one a line")
    listing.add_argument("--source", help="document: " + ", ".join(DOCUMENTS))
    listing.add_argument("--model", help="such as resnet50, bert-large or dlrm")
    command("show", _show, "show all that is known of a row").add_argument("row", metavar="ROW")
    one = command("run", _run, "run rows by the rule of their document")
    one.add_argument("rows", metavar="ROW", nargs="+", help="id, or a pattern such as 'gaudi/*'")
    running = [one]
    text = "translate a command line that source 003 or 004 prints"
    command("translate", _translate, text).add_argument("command", metavar="'COMMAND LINE'")
    trend = command("trend", _trend, "check that the losses of two rows follow each other")
    trend.add_argument("row", metavar="ROW")
    trend.add_argument("--against", metavar="ROW", required=True, help="the reference")
    trend.add_argument("--steps", type=_at_least_one, default=500)
    trend.add_argument(
        "--bound",
        type=float,
        help="largest relative gap; default: 1e-4, or 3e-2 where the rows differ in precision",
    )
    trend.add_argument(
        "--change",
        action="append",
        default=[],
        metavar="FLAG",
        help="of the first row only, as --change=--execution=graph",
    )
    seeds = command("seeds", _seeds, "train a row from many seeds")
    seeds.add_argument("row", metavar="ROW")
    seeds.add_argument("--n", type=_at_least_one, default=16, help="how many seeds; default: 16")
    seeds.add_argument("--first", type=int, default=8, help="the first seed; default: 8")
    scaling = command("scaling", _scaling, "run a row at several places of a grid")
    scaling.add_argument("row", metavar="ROW")
    for each in (*running, trend, seeds, scaling):
        _add_running(each)
    table = command("table", _table, "print a document's table with what was measured here")
    table.add_argument("document", metavar="DOCUMENT", help=", ".join(DOCUMENTS))
    table.add_argument("--format", choices=("markdown", "csv", "html"), default="markdown")
    table.add_argument("--output", metavar="FILE", help="where to write it; default: print it")
    table.add_argument("--results", type=Path, default=Path(_RESULTS), metavar="FILE")
    document = command("document", _document, "write the page that lists all rows")
    document.add_argument("output", metavar="FILE", help="docs/systems.md in a clone")
    return parser


def _add_running(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "What follows -- goes to the row's command, and takes precedence. Runs start in folders of "
        "their own, so give absolute paths there."
    )
    add = parser.add_argument
    add("--dataset", metavar="DIR", help="the row's data; without it they are generated")
    add("--smoke", action="store_true", help="reduced sizes, two steps: does it run at all?")
    add("--emulate", action="store_true", help="fewer processes may compute the same global batch")
    add("--pipeline", action="store_true", help="a process for each part of the row's network")
    add("--grid", type=_grid, default=(), help="places, nodes and all devices: 1n1d,1n2d")
    add("--repeats", type=_at_least_one, help="runs; default: the rule's")
    add("--threads", type=_at_least_one, help="of each process; default: cores / processes")
    add(
        "--results",
        type=Path,
        default=Path(_RESULTS),
        metavar="FILE",
        help=f"where runs are kept, and found again; default: {_RESULTS}",
    )
    add("--keep", type=Path, metavar="DIR", help="keep the runs' logs and checkpoints there")
