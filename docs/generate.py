"""Writes what follows from code and pages: flags, the Python API, its tables, and a notebook.

python docs/generate.py            writes commands, flags, schema, python, transforms and
                                   metrics.md, and the notebook of the tutorial
python docs/generate.py --check    writes nothing; exit code 1 if a page is not up to date
"""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import argparse
import importlib
import inspect
import multiprocessing
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from as_notebook import as_notebook

import dlrm
from dlrm import ops
from dlrm.api.dataset import Dataset
from dlrm.api.training import SETTINGS
from dlrm.data import choices
from dlrm.data.schema.fields import CategoricalField, Cross, Label, NumericalField, TimeField
from dlrm.data.schema.numeric_transforms import NUMERIC_TRANSFORMS
from dlrm.data.schema.schema import Schema
from dlrm.data.sources.text_format import TextFormat
from dlrm.flags import ConfigFlags
from dlrm.metrics.table import METRICS
from dlrm.published.command import TASKS as SYSTEMS
from dlrm.scripts.commands import COMMANDS, run
from dlrm.serving.predictor import Predictor
from dlrm.settings import defaults_of, settings_of
from dlrm.tasks.click_task import ClickTask

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"
TRAINING = "dlrm train"  # of whose flags three others differ in defaults alone
OTHER_DEFAULTS = ("dlrm test", "python -m dlrm.scripts.main", "python -m dlrm.scripts.dist_main")
_STATE = "`python docs/generate.py` writes this page from the {}; a test compares the two.\n"


class Flag(NamedTuple):
    """One row of a table of flags."""

    name: str
    default: str
    text: str
    topic: str = ""


class _Captured(Exception):  # noqa: N818  # no error
    """Ends a command when its command line is defined, before it is parsed."""

    def __init__(self, flags: list[Flag]):
        super().__init__()
        self.flags = flags


def main() -> int:
    """Writes or compares the pages; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    options = parser.parse_args()
    stale = []
    pages = {"flags": flags_page, "python": python_page, "transforms": transforms_page}
    pages |= {"metrics": metrics_page, "commands": commands_page, "schema": schema_page}
    files = {REFERENCE / f"{name}.md": page for name, page in pages.items()}
    tutorial = ROOT / "docs" / "tutorial.md"
    files[tutorial.with_suffix(".ipynb")] = lambda: as_notebook(tutorial.read_text())
    for path, page in files.items():
        text = page()
        if path.exists() and path.read_text() == text:
            continue
        stale.append(path.relative_to(ROOT))
        if not options.check:
            path.write_text(text)
    for path in stale:
        print(f"{path} is out of date" if options.check else f"wrote {path}")
    if stale and options.check:
        print("python docs/generate.py writes it anew")
    return 1 if stale and options.check else 0


def flags_page() -> str:
    """Returns the page of all flags, a table for each command."""
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        programs = [f"dlrm {name}" for name in COMMANDS if name != "systems"]
        programs += [*(f"dlrm systems {task}" for task in SYSTEMS), *OTHER_DEFAULTS[1:]]
        found = dict(zip(programs, pool.map(command_flags, programs, chunksize=1), strict=True))
        pool.close()  # its end would stop a command with a signal
        pool.join()
    parts = ["# Flags\n", _STATE.format("commands' definitions")]
    parts.append(
        "Every command also reads flags from a file (`--flagfile FILE`), which spells names with "
        "underscores, or from a YAML file (`--config FILE`, [the command](../guide/command.md)), "
        "prints its version (`--version`), and turns switches off by "
        "`--noNAME`. Dashes may stand for underscores, as in `--save-dir`. `triton/deployer.py` "
        "takes the flags of `dlrm export` and NVIDIA's.\n"
    )
    for program, flags in found.items():
        parts.append(f"## {program}\n")
        if program in OTHER_DEFAULTS:
            flags = [flag for flag in flags if flag not in found[TRAINING]]
            parts.append(f"The flags of `{TRAINING}`, with these defaults:\n")
        parts += _tables(flags)
    return "\n".join(parts)


def _tables(flags: list[Flag]) -> Iterator[str]:
    for topic in dict.fromkeys(flag.topic for flag in flags):
        if topic:
            yield f"**{topic}**\n"
        yield "| flag | default | meaning |\n|---|---|---|"
        for flag in flags:
            if flag.topic == topic:
                yield f"| `{flag.name}` | {_code(flag.default)} | {_cell(flag.text)} |"
        yield ""


def _code(text: str) -> str:
    return f"`{_cell(text)}`" if text else ""


def _cell(text: str) -> str:
    text = re.sub(r"^\s*<([^>]+)>: ", lambda m: f"{m[1].replace('|', ', ')}: ", text)
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;").strip()


def command_flags(program: str) -> list[Flag]:
    """Returns the flags of `dlrm NAME` or `python -m MODULE`, which runs up to its command line."""
    ConfigFlags.parse = _capture
    first, name, *words = program.split()
    try:
        if first == "dlrm":
            run(COMMANDS[name], words)
        else:
            importlib.import_module(words[0]).main([])
    except _Captured as captured:
        return captured.flags
    except SystemExit as error:
        raise AssertionError(f"{program} ended before it parsed flags: {error}") from None
    raise AssertionError(f"{program} defined no flags")


def _capture(line: ConfigFlags, *_: object) -> None:
    raise _Captured(list(_flags_of(line)))


def _flags_of(line: ConfigFlags) -> Iterator[Flag]:
    """Yields the arguments and flags of a command line; a single topic needs no heading."""
    for name in line.positional:
        yield Flag(name, "", line.settings[name].help)
    by_topic = line._flags.key_flags_by_module_dict()
    for topic in line.topics:
        for flag in by_topic[topic]:
            short = f"-{flag.short_name}, " if flag.short_name else ""
            default = "" if flag.default in (None, []) else flag.default_as_str.strip("'")
            heading = topic if len(line.topics) > 1 else ""
            yield Flag(f"{short}--{flag.name}", default, flag.help, heading)


def python_page() -> str:
    """Returns the page of the Python API, from docstrings."""
    parts = ["# Python API\n", _STATE.format("docstrings")]
    for heading, objects in _api():
        parts.append(f"## {heading}\n")
        for name, item in objects:
            parts.append(f"### `{name}{_signature(item)}`\n\n{_docstring(item)}\n")
    return "\n".join(parts)


def transforms_page() -> str:
    """Returns the page of numerical transforms."""
    parts = [
        "# Numerical transforms\n",
        _STATE.format("classes"),
        "| transform | result for x | note |",
    ]
    parts.append("|---|---|---|")
    for name, meaning in choices.NUMERIC_TRANSFORMS.items():
        note = NUMERIC_TRANSFORMS[name].note
        parts.append(f"| `{name}` | {_cell(meaning)} | {_cell(note)} |")
    return "\n".join(parts) + "\n"


def schema_page() -> str:
    """Returns the page of the entries of `schema.yaml`."""
    parts = ["# Entries of schema.yaml\n", _STATE.format("schema's fields")]
    kinds: dict[str, type] = {"schema.yaml": Schema, "label": Label, "numerical": NumericalField}
    kinds |= {"categorical": CategoricalField, "crosses": Cross, "time": TimeField}
    kinds["format"] = TextFormat
    for name, kind in kinds.items():
        parts.append(f"## {name}\n\n{_docstring(kind).splitlines()[0]}\n")
        parts.append("| entry | default | meaning |\n|---|---|---|")
        defaults = defaults_of(kind)
        for entry, own in settings_of(kind).items():
            default = defaults.get(entry)
            shown = "" if default in (None, ()) else str(default).lower() * (default is not False)
            names = f" (one of {', '.join(own.choices)})" if own.choices else ""
            parts.append(f"| `{entry}` | {_code(shown)} | {_cell(own.help)}{names} |")
        parts.append("")
    return "\n".join(parts)


def metrics_page() -> str:
    """Returns the page of metrics."""
    parts = ["# Metrics\n", _STATE.format("table of metrics"), "| metric | of | meaning |"]
    parts.append("|---|---|---|")
    meanings: dict[str, list[str]] = {}
    for name, metric in METRICS.items():
        meanings.setdefault(f"{metric.meaning}; {metric.better}", []).append(name)
    for meaning, names in meanings.items():
        metric = METRICS[names[0]]
        called = f"{metric.title}: " if metric.title and len(names) == 1 else ""
        parts.append(f"| `{'`, `'.join(names)}` | {metric.of} | {called}{meaning} |")
    return "\n".join(parts) + "\n"


def commands_page() -> str:
    """Returns the page of the subcommands of `dlrm`."""
    parts = ["# Commands\n", _STATE.format("table of commands")]
    for group in dict.fromkeys(command.group for command in COMMANDS.values()):
        parts.append(f"## {group}\n\n| command | module | task |\n|---|---|---|")
        for name, command in COMMANDS.items():
            if command.group == group:
                parts.append(f"| `dlrm {name}` | `{command.module}` | {_cell(command.meaning)} |")
        parts.append("")
    return "\n".join(parts)


def _api() -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    yield (
        "dlrm",
        [
            ("dlrm.fit", dlrm.fit),
            ("dlrm.update", dlrm.update),
            ("dlrm.Classifier", dlrm.Classifier),
            *_methods("dlrm.Classifier", dlrm.Classifier),
            ("dlrm.load", dlrm.load),
            ("dlrm.Dataset", Dataset),
            *_methods("dlrm.Dataset", Dataset),
            ("dlrm.Schema", dlrm.Schema),
            *_methods("dlrm.Schema", dlrm.Schema),
        ],
    )
    yield "dlrm.preproc", [("dlrm.preproc.run", dlrm.preproc.run)]
    yield "Models", [("Predictor", Predictor), *_methods("Predictor", Predictor)]
    yield "Own networks", [("dlrm.tasks.click_task.ClickTask", ClickTask)]
    operators = {f"dlrm.ops.{name}": getattr(ops, name) for name in ops.__all__}
    yield "dlrm.ops", [(name, item) for name, item in operators.items() if callable(item)]


def _methods(prefix: str, cls: type) -> list[tuple[str, Callable[..., Any]]]:
    of_sklearn = "_request"  # methods that scikit-learn adds
    public = [name for name in vars(cls) if not name.startswith("_")]
    public = [name for name in public if not name.endswith(of_sklearn)]
    methods = [(f"{prefix}.{name}", getattr(cls, name)) for name in public]
    routines = [(name, item) for name, item in methods if inspect.isroutine(item)]
    bound = [(n, of.__get__(cls) if inspect.isfunction(of) else of) for n, of in routines]
    return [(name, item) for name, item in bound if callable(item) and item.__doc__]


def _signature(item: Any) -> str:
    parameters = inspect.signature(item).parameters.values()
    shown = [_parameter(one) for one in parameters if one.name not in SETTINGS]
    settings = ["**settings"] if len(shown) < len(parameters) else []
    return f"({', '.join(shown + settings)})"


def _parameter(one: inspect.Parameter) -> str:
    stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
    plain = one.default is None or isinstance(one.default, (str, int, float))
    return f"{stars}{one.name}" + (f"={one.default!r}" if plain else "")


def _docstring(item: Any) -> str:
    """Returns a docstring as Markdown: its sections' entries become lists."""
    text = inspect.getdoc(item) or ""
    summary, *sections = re.split(r"(?m)^(?=(?:Args|Returns|Raises|Attributes|Yields):$)", text)
    for section in sections:
        title, _, body = section.partition(":\n")
        body = re.sub(r"(?m)^ {4}(?! )([\w, .]+): ", r"* `\1`: ", body)
        body = re.sub(r"(?m)^ {8}", "  ", body)
        summary += f"**{title}**\n\n" + re.sub(r"(?m)^ {4}", "", body)
    return summary


if __name__ == "__main__":
    sys.exit(main())
