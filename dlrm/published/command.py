"""Lists, runs and compares the benchmark rows of the five source documents.

dlrm systems list --source 003
dlrm systems show gaudi/rn50/graph-bf16-b256
dlrm systems run dlperf/rn50/fp32-b128/1n1d --grid 1n1d,1n2d
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import fnmatch
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dlrm.command_line import say_error
from dlrm.files import errors_named
from dlrm.flags import ConfigFlags, Subcommands, UsageError, Values, run_command
from dlrm.published import compare, results, show, tables
from dlrm.published.catalog import CATALOG, DOCUMENTS, select
from dlrm.published.documents.benchmark_row import BenchmarkRow, find
from dlrm.published.documents.translation import translate
from dlrm.published.jobs import MOST, RunOptions, check_command, plan_jobs
from dlrm.published.results import finished, read
from dlrm.published.runner import Records, run_job
from dlrm.settings import REQUIRED, setting


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
    """Some rows."""

    rows: tuple[str, ...] = setting(
        REQUIRED, "ids of rows, or patterns such as 'gaudi/*'", positional=True
    )


@dataclass(frozen=True)
class TranslateConfig:
    """Another program's command line."""

    command: str = setting(REQUIRED, "the command line, as one word", positional=True)


@dataclass(frozen=True)
class SeedsConfig:
    """A row, and the seeds to train it from."""

    row: str = setting(REQUIRED, "id of a row", positional=True)
    n: int = setting(16, "number of seeds", least=1, most=MOST)
    first: int = setting(8, "first seed", least=0, most=MOST)


@dataclass(frozen=True)
class ResultsConfig:
    """The file of results."""

    results: Path = setting(
        Path("systems.jsonl"), "file of results, in which finished runs are not repeated"
    )


@dataclass(frozen=True)
class KeepConfig:
    """The place of what runs write."""

    keep: Path | None = setting(None, "directory in which to keep the runs' logs and checkpoints")


@dataclass(frozen=True)
class TableConfig:
    """A table, and where it is written."""

    document: str = setting(REQUIRED, ", ".join(DOCUMENTS), positional=True)
    format: str = setting("markdown", "format of the table", choices=("markdown", "csv", "html"))
    output: str | None = setting(None, "file to write; default: print the table")


@dataclass(frozen=True)
class DocumentConfig:
    """The page of all rows."""

    output: str = setting(REQUIRED, "file to write, docs/systems.md in a clone", positional=True)


def command_line() -> Subcommands:
    """Returns the command line."""
    return Subcommands(
        {
            task: (meaning, ConfigFlags([*(("Flags", one) for one in own), *more]))
            for task, (_, meaning, own, more) in _TASKS.items()
        }
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code: 0, 1 for a failed run or check, 2."""
    own, flags = sys.argv[1:] if arguments is None else arguments, []
    if "--" in own:
        cut = own.index("--")
        own, flags = own[:cut], own[cut + 1 :]

    def act(values: Values) -> int:
        if flags and "smoke" not in values:
            raise UsageError("only commands that run rows take flags after --")
        return _act(Values({**values, "flags": tuple(flags)}, values.given))

    hint = "the same command runs what is missing"
    return run_command(command_line(), act, __doc__, own, code=2, hint=hint)


def _act(options: Values) -> int:
    try:
        if "smoke" not in options:
            return _TASKS[options["task"]][0](options)
        with results.claimed(options["results"]):
            return _TASKS[options["task"]][0](options)
    except BrokenPipeError:  # the reader has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # until the process ends
        return 0
    except compare.FailedRunError as error:
        return say_error(error, 1)


def _list(options: Values) -> int:
    print(show.table(select(options["source"], options["model"])))
    return 0


def _show(options: Values) -> int:
    print(show.describe(find(CATALOG, options["row"])))
    return 0


def _translate(options: Values) -> int:
    text = show.translation(options["command"])
    result = translate(options["command"])
    if result.processes < 1:
        raise ValueError(f"expected one replica or more, got {result.processes}")
    check_command(result.command, result.flags)
    print(text)
    return 0


def _run(options: Values) -> int:
    chosen = [row for name in options["rows"] for row in _matching(name)]
    if len(chosen) == 1 and chosen[0].measure != "run":
        return _compared(chosen[0], options)
    jobs, passed = [], 0
    for row in chosen:
        try:
            if row.measure != "run":
                raise ValueError(f"{row.id} compares runs: run it by itself")
            jobs += plan_jobs(row, _options(options))
        except (ValueError, OSError) as error:
            if len(chosen) == 1:
                raise
            print(f"passed over: {error}")
            passed += 1
    failed = 0
    for job in jobs:
        records = run_job(job, _records(options))
        good = finished(records)[: job.repeats]
        failed += job.repeats - len(good)
        for result in tables.results(good):
            print(tables.summary(result))
    if failed:
        print(
            f"error: {failed} run{'s' * (failed > 1)} failed, with the errors in "
            f"{options['results']}; the same command runs what is missing",
            file=sys.stderr,
        )
    return 1 if failed or passed else 0


def _compared(row: BenchmarkRow, options: Values) -> int:
    """Runs a row that compares runs of others."""
    given, own = options.given, dict[str, Any]()
    if row.measure == "trend":
        own = {"row": row.of, "against": row.against, "bound": None, "change": (), "steps": None}
        return _trend(Values({**options, **own}, given))
    if row.measure == "seeds":
        own = {"row": row.id, "n": 2 if options["smoke"] else 16, "first": 8}
        return _seeds(Values({**options, **own}, given))
    own = {"row": row.of, "grid": options["grid"] or ("1n1d", row.grid)}
    code = _scaling(Values({**options, **own}, given))
    print(f"published: {', '.join(map(str, row.published))} ({row.hardware})")
    return code


def _single(name: str) -> BenchmarkRow:
    """Returns a row that is run itself."""
    row = find(CATALOG, name)
    if row.measure != "run":
        raise ValueError(f"{row.id} compares runs of {row.of}: `run` it, or name that row")
    return row


def _trend(options: Values) -> int:
    row, against = (_single(name) for name in (options["row"], options["against"]))
    asked = options.config(compare.TrendConfig)
    follows = compare.trend(row, against, asked, _options(options), _records(options))
    return 0 if follows else 1


def _seeds(options: Values) -> int:
    row = find(CATALOG, options["row"])
    single = _options(options, repeats=1)

    def of_seed(name: str) -> Callable[[int], tuple[BenchmarkRow, RunOptions]]:
        """Returns the row of a seed if the catalog has one, else the row with another seed."""

        def column(seed: int) -> tuple[BenchmarkRow, RunOptions]:
            own = re.sub(r"/seed-\d+/", f"/seed-{seed}/", name)
            if own in CATALOG and f"--seed={seed}" in CATALOG[own].flags:
                return CATALOG[own], single
            return CATALOG[name], replace(single, flags=(*single.flags, f"--seed={seed}"))

        return column

    ids, names = [row.id], [""]
    if row.measure == "seeds":
        ids = [name for name in (row.of, row.against) if name]
        names = [figure.system for figure in row.published]
    elif row.measure != "run":
        _single(options["row"])
    columns = [of_seed(name) for name in ids]
    numbers = range(options["first"], options["first"] + options["n"])
    to = _records(options)._replace(say=partial(print, file=sys.stderr))
    print(compare.seeds(columns, numbers, names, to))
    if options["smoke"]:
        print("\nsmoke runs at reduced sizes: nothing to compare")
    return 0


def _scaling(options: Values) -> int:
    row = _single(options["row"])
    records = compare.scaled(row, _options(options), _records(options))
    found = tables.results(records)
    print(tables.dlperf_report(found))
    for result in found:
        print(f"{result.record['label']}: {tables.comparison(result)}")
        if result.figure.warning and not options["smoke"]:
            print(result.figure.warning)
    return 0


def _table(options: Values) -> int:
    if options["document"] not in DOCUMENTS:
        raise ValueError(f"{options['document']}: expected a document of {', '.join(DOCUMENTS)}")
    known = [r for r in read(options["results"]) if CATALOG.get(r["row"])]
    found = [r for r in tables.results(known) if r.row.source.startswith(options["document"])]
    table, title = tables.rows_of(options["document"], found), tables.title_of(options["document"])
    writers: dict[str, Callable[[], str]] = {
        "markdown": lambda: tables.as_markdown(title, table),
        "csv": lambda: tables.as_csv(table),
        "html": lambda: tables.as_html(title, table, found),
    }
    text = writers[options["format"]]()
    if options["output"]:
        _write(options["output"], text)
        print(f"{options['output']}: {len(table)} rows, {len(found)} of them measured")
    else:
        print(text, end="")
    return 0


def _write(path: str, text: str) -> None:
    with errors_named(path):
        Path(path).write_text(text)


def _document(options: Values) -> int:
    _write(options["output"], show.document())
    print(f"{options['output']}: {len(CATALOG)} rows")
    return 0


def _matching(name: str) -> list[BenchmarkRow]:
    """Returns the row of a name, or all rows of a pattern."""
    if any(character in name for character in "*?["):
        rows = [row for key, row in CATALOG.items() if fnmatch.fnmatchcase(key, name)]
        if not rows:
            raise ValueError(f"{name}: no row matches it; `list` shows all")
        return rows
    return [find(CATALOG, name)]


def _records(options: Values) -> Records:
    return Records(options["results"], options["keep"])


def _options(options: Values, repeats: int | None = None) -> RunOptions:
    own = {} if repeats is None else {"repeats": repeats}
    return options.config(RunOptions, **own)


_RUNNING = (("Run", RunOptions), ("Run", ResultsConfig), ("Run", KeepConfig))
_Task = tuple[Callable[[Values], int], str, Sequence[type], Sequence[tuple[str, type]]]
_TASKS: dict[str, _Task] = {
    "list": (_list, "list rows, one a line", (ListConfig,), ()),
    "show": (_show, "show everything known of a row", (RowConfig,), ()),
    "run": (_run, "run rows by the rule of their document", (RowsConfig,), _RUNNING),
    "translate": (
        _translate,
        "translate a command line that source 003 or 004 prints",
        (TranslateConfig,),
        (),
    ),
    "trend": (
        _trend,
        "check that the losses of two rows follow each other",
        (compare.TrendConfig,),
        _RUNNING,
    ),
    "seeds": (_seeds, "train a row from many seeds", (SeedsConfig,), _RUNNING),
    "scaling": (_scaling, "run a row at several places of a grid", (RowConfig,), _RUNNING),
    "table": (
        _table,
        "print a document's table with what was measured here",
        (TableConfig, ResultsConfig),
        (),
    ),
    "document": (_document, "write the page that lists all rows", (DocumentConfig,), ()),
}


if __name__ == "__main__":
    sys.exit(main())
