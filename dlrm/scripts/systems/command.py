"""Lists, runs and compares the benchmark rows of the five source documents.

python -m dlrm.scripts.systems list --source 003
python -m dlrm.scripts.systems show gaudi/rn50/graph-bf16-b256
python -m dlrm.scripts.systems run dlperf/rn50/fp32-b128/1n1d --grid 1n1d,1n2d
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import argparse
import fnmatch
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dlrm.command_line import Parser, exit_code_of, say_error
from dlrm.files import errors_named
from dlrm.scripts.systems import compare, results, show, tables
from dlrm.scripts.systems.jobs import Options, check_command, plan
from dlrm.scripts.systems.results import finished, read
from dlrm.scripts.systems.runner import run
from dlrm.systems.catalogue import CATALOGUE, DOCUMENTS, select
from dlrm.systems.rows import System, find
from dlrm.systems.translation import translate

_RESULTS = "systems.jsonl"


def main(arguments: list[str]) -> int:
    """Runs a command line; returns the exit code: 0, 1 for a failed run or check, 2."""
    hint = "the same command runs what is missing"
    return exit_code_of(lambda: _act(_parse(arguments)), code=2, hint=hint)


def _parse(arguments: list[str]) -> argparse.Namespace:
    own, flags = arguments, []
    if "--" in arguments:
        cut = arguments.index("--")
        own, flags = arguments[:cut], arguments[cut + 1 :]
    parser = _parser()
    options = parser.parse_args(own)
    if flags and not hasattr(options, "smoke"):
        parser.error("only commands that run rows take flags after --")
    options.flags = tuple(flags)
    return options


def _act(options: argparse.Namespace) -> int:
    try:
        if not hasattr(options, "smoke"):
            return options.act(options)
        with results.claimed(options.results):
            return options.act(options)
    except BrokenPipeError:  # the reader has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # until the process ends
        return 0
    except compare.FailedRunError as error:
        return say_error(error, 1)


def _list(options: argparse.Namespace) -> int:
    print(show.table(select(options.source, options.model)))
    return 0


def _show(options: argparse.Namespace) -> int:
    print(show.describe(find(CATALOGUE, options.row)))
    return 0


def _translate(options: argparse.Namespace) -> int:
    text = show.translation(options.command)
    result = translate(options.command)
    if result.processes < 1:
        raise ValueError(f"expected one replica or more, got {result.processes}")
    check_command(result.command, result.flags)
    print(text)
    return 0


def _run(options: argparse.Namespace) -> int:
    chosen = [row for name in options.rows for row in _matching(name)]
    if len(chosen) == 1 and chosen[0].measure != "run":
        return _compared(chosen[0], options)
    jobs, passed = [], 0
    for row in chosen:
        try:
            if row.measure != "run":
                raise ValueError(f"{row.id} compares runs: run it by itself")
            jobs += plan(row, _options(options))
        except (ValueError, OSError) as error:
            if len(chosen) == 1:
                raise
            print(f"passed over: {error}")
            passed += 1
    failed = 0
    for job in jobs:
        records = run(job, options.results, options.keep)
        good = finished(records)[: job.repeats]
        failed += job.repeats - len(good)
        for result in tables.results(good):
            print(tables.summary(result))
    if failed:
        print(
            f"error: {failed} run{'s' * (failed > 1)} failed, with the errors in "
            f"{options.results}; the same command runs what is missing",
            file=sys.stderr,
        )
    return 1 if failed or passed else 0


def _compared(row: System, options: argparse.Namespace) -> int:
    """Runs a row that compares runs of others."""
    if row.measure == "trend":
        options.row, options.against, options.bound, options.change = row.of, row.against, None, ()
        options.steps = None
        return _trend(options)
    if row.measure == "seeds":
        options.row, options.n, options.first = row.id, 2 if options.smoke else 16, 8
        return _seeds(options)
    options.row, options.grid = row.of, options.grid or ("1n1d", row.grid)
    code = _scaling(options)
    print(f"published: {', '.join(map(str, row.published))} ({row.hardware})")
    return code


def _single(name: str) -> System:
    """A row that is run itself.

    Raises:
        ValueError: it compares runs of others.
    """
    row = find(CATALOGUE, name)
    if row.measure != "run":
        raise ValueError(f"{row.id} compares runs of {row.of}: `run` it, or name that row")
    return row


def _trend(options: argparse.Namespace) -> int:
    row, against = (_single(name) for name in (options.row, options.against))
    follows = compare.trend(
        row,
        against,
        options.steps or (20 if options.smoke else 500),
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
    single = _options(options, repeats=1)

    def of_seed(name: str) -> Callable[[int], tuple[System, Options]]:
        """Returns the row of a seed if the catalogue has one, else the row with another seed."""

        def column(seed: int) -> tuple[System, Options]:
            own = re.sub(r"/seed-\d+/", f"/seed-{seed}/", name)
            if own in CATALOGUE and f"--seed={seed}" in CATALOGUE[own].flags:
                return CATALOGUE[own], single
            return CATALOGUE[name], replace(single, flags=(*single.flags, f"--seed={seed}"))

        return column

    ids, names = [row.id], [""]
    if row.measure == "seeds":
        ids = [name for name in (row.of, row.against) if name]
        names = [figure.system for figure in row.published]
    elif row.measure != "run":
        _single(options.row)
    columns = [of_seed(name) for name in ids]
    numbers = range(options.first, options.first + options.n)
    table = compare.seeds(columns, numbers, names, options.results, options.keep, _to_stderr)
    print(table)
    if options.smoke:
        print("\nsmoke runs at reduced sizes: nothing to compare")
    return 0


def _scaling(options: argparse.Namespace) -> int:
    row = _single(options.row)
    records = compare.scaled(row, _options(options), options.results, options.keep, print)
    found = tables.results(records)
    print(tables.dlperf_report(found))
    for result in found:
        print(f"{result.record['label']}: {tables.comparison(result)}")
        if result.figure.warning and not options.smoke:
            print(result.figure.warning)
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
        _write(options.output, text)
        print(f"{options.output}: {len(table)} rows, {len(found)} of them measured")
    else:
        print(text, end="")
    return 0


def _write(path: str, text: str) -> None:
    with errors_named(path):
        Path(path).write_text(text)


def _document(options: argparse.Namespace) -> int:
    _write(options.output, show.document())
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


def _options(options: argparse.Namespace, repeats: int | None = None) -> Options:
    return Options(
        dataset=options.dataset,
        smoke=options.smoke,
        emulate=options.emulate,
        pipeline=options.pipeline,
        grid=options.grid,
        repeats=repeats or options.repeats,
        threads=options.threads,
        flags=options.flags,
    )


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def _grid(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _whole(least: int, most: int = 10**6) -> Callable[[str], int]:
    def parsed(text: str) -> int:
        if not re.fullmatch(r"\d{1,9}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"expected {least} to {most}, got {text!r}")
        return int(text)

    return parsed


def _parser() -> Parser:
    summary, _, usage = __doc__.partition("\n\n")
    parser = Parser(f"{summary}\n\n{usage}", "python -m dlrm.scripts.systems")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, act: Callable[[argparse.Namespace], int], text: str):
        made = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        made.set_defaults(act=act)
        return made

    listing = command("list", _list, "list rows, one a line")
    listing.add_argument("--source", help="document: " + ", ".join(DOCUMENTS))
    listing.add_argument("--model", help="model, such as resnet50, bert-large or dlrm")
    command("show", _show, "show everything known of a row").add_argument("row", metavar="ROW")
    one = command("run", _run, "run rows by the rule of their document")
    one.add_argument(
        "rows", metavar="ROW", nargs="+", help="id of a row, or a pattern such as 'gaudi/*'"
    )
    running = [one]
    text = "translate a command line that source 003 or 004 prints"
    command("translate", _translate, text).add_argument("command", metavar="'COMMAND LINE'")
    trend = command("trend", _trend, "check that the losses of two rows follow each other")
    trend.add_argument("row", metavar="ROW")
    trend.add_argument("--against", metavar="ROW", required=True, help="row to compare with")
    trend.add_argument(
        "--steps", type=_whole(5), help="number of steps; default: 500, or 20 with --smoke"
    )
    trend.add_argument(
        "--bound",
        type=float,
        help="largest relative difference of losses; default: 1e-4, or 3e-2 if the rows differ in "
        "precision",
    )
    trend.add_argument(
        "--change",
        action="append",
        default=[],
        metavar="FLAG",
        help="flag of the first row only, such as --change=--execution=graph",
    )
    seeds = command("seeds", _seeds, "train a row from many seeds")
    seeds.add_argument("row", metavar="ROW")
    seeds.add_argument("--n", type=_whole(1), default=16, help="number of seeds; default: 16")
    seeds.add_argument("--first", type=_whole(0), default=8, help="first seed; default: 8")
    scaling = command("scaling", _scaling, "run a row at several places of a grid")
    scaling.add_argument("row", metavar="ROW")
    for each in (*running, trend, seeds, scaling):
        _add_running(each)
    table = command("table", _table, "print a document's table with what was measured here")
    table.add_argument("document", metavar="DOCUMENT", help=", ".join(DOCUMENTS))
    table.add_argument(
        "--format",
        choices=("markdown", "csv", "html"),
        default="markdown",
        help="format of the table; default: markdown",
    )
    table.add_argument("--output", metavar="FILE", help="file to write; default: print the table")
    table.add_argument(
        "--results",
        type=Path,
        default=Path(_RESULTS),
        metavar="FILE",
        help=f"file of results to read; default: {_RESULTS}",
    )
    document = command("document", _document, "write the page that lists all rows")
    document.add_argument(
        "output", metavar="FILE", help="file to write, docs/systems.md in a clone"
    )
    return parser


def _add_running(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "What follows -- goes to the row's command, and takes precedence. Runs start in folders of "
        "their own, so give absolute paths there."
    )
    add = parser.add_argument
    add("--dataset", metavar="DIR", help="directory of the row's data; default: generated data")
    add("--smoke", action="store_true", help="run two steps at reduced sizes, as a test")
    add("--emulate", action="store_true", help="let fewer processes compute the same global batch")
    add(
        "--pipeline", action="store_true", help="use one process for each part of the row's network"
    )
    add(
        "--grid",
        type=_grid,
        default=(),
        help="numbers of nodes and of devices in all, such as 1n1d,1n2d",
    )
    add("--repeats", type=_whole(1), help="number of runs; default: that of the document's rule")
    add("--threads", type=_whole(1), help="threads of each process; default: cores / processes")
    add(
        "--results",
        type=Path,
        default=Path(_RESULTS),
        metavar="FILE",
        help=f"file of results, in which finished runs are not repeated; default: {_RESULTS}",
    )
    add(
        "--keep",
        type=Path,
        metavar="DIR",
        help="directory in which to keep the runs' logs and checkpoints",
    )
