"""All commands of `dlrm`, by the names of its subcommands: dlrm train --dataset DIR ...

Each is a module with a function `main`, which is imported once the command is chosen. Modules
under NVIDIA's names, such as `dlrm.scripts.main`, run by `python -m` as well.
"""

import difflib
import importlib
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from dlrm.command_line import exit_code_of, say_error, show
from dlrm.version import version_line


class Command(NamedTuple):
    """A subcommand.

    Attributes:
        group: heading of the help.
        module: module for `python -m`, whose `main` runs a command line and returns the exit code.
        meaning: line of the help.
        defaults: other defaults of its flags, by name; they do not count as given by the user.
        launched: module instead, in a process of a launcher such as torchrun.
    """

    group: str
    module: str
    meaning: str
    defaults: Mapping[str, Any] | None = None
    launched: str | None = None


_SHORT, _DIST = {"log_format": "short"}, "dlrm.scripts.dist_main"
# Group -> command -> module of dlrm and meaning; defaults and module of a launcher's process.
_GROUPS: dict[str, dict[str, tuple[Any, ...]]] = {
    "Prepare data": {
        "schema": ("scripts.schema", "draft a schema from tables"),
        "prepare": ("scripts.prepare", "turn tables or logs into a dataset"),
        "convert": ("scripts.convert", "convert a dataset to Parquet"),
    },
    "Train and judge models": {
        "train": ("scripts.main", "train a model", _SHORT | {"mode": "train"}, _DIST),
        "test": ("scripts.main", "test a checkpoint", _SHORT | {"mode": "test"}, _DIST),
        "evaluate": ("scripts.evaluate", "judge a model on new rows, or two models"),
        "predict": ("scripts.predict", "score rows with a model"),
        "tune": ("scripts.tune", "search for better settings"),
        "daily": ("scripts.daily", "learn a log day by day, judged on each day"),
        "checkpoint": ("scripts.checkpoint", "inspect or convert checkpoints"),
    },
    "Serve models": {
        "export": ("deployment.export", "write a model repository for Triton"),
        "serve": ("deployment.server", "run a Triton server"),
        "client": ("deployment.client", "send rows to a Triton server"),
    },
    "Try and measure": {
        "demo": ("scripts.demo", "run all steps on generated logs"),
        "doctor": ("scripts.doctor", "check this installation and machine"),
        "simulate": ("scripts.simulate_logs", "write click logs whose best AUC is known"),
        "synthetic": ("scripts.prepare_synthetic_dataset", "write a dataset of random rows"),
        "systems": ("published.command", "list and run published benchmarks"),
    },
    "Image networks and BERT": {
        "cnn": ("scripts.cnn", "train, validate or time ResNet and others"),
        "bert": ("scripts.bert", "train, evaluate or time BERT"),
        "prepare-text": ("language.prepare_text", "turn text into a dataset for bert"),
    },
    "NVIDIA's formats": {
        "prepare-logs": (
            "preproc.logs.prepare_logs",
            "turn Criteo's logs into a dataset, step by step",
        ),
        "transcode": ("scripts.transcode", "turn NVIDIA's CSV files into a dataset"),
        "split-dataset": (
            "scripts.split_dataset",
            "split a binary dataset into a file per feature",
        ),
        "gen-csv": ("scripts.gen_csv", "write random CSV files for transcode"),
    },
}
COMMANDS = {
    name: Command(group, f"dlrm.{module}", *own)
    for group, found in _GROUPS.items()
    for name, (module, *own) in found.items()
}


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code.

    Args:
        arguments: words after `dlrm`; by default those of this process.
    """
    if arguments is None:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while torch is imported
        arguments = sys.argv[1:]
    name, *own = arguments or ["--help"]
    if name in COMMANDS:
        return run(COMMANDS[name], own)
    texts = {"--help": help_text, "-h": help_text, "--version": version_line}
    if name not in texts:
        known = difflib.get_close_matches(name.lower(), [*COMMANDS, *texts], 1)
        near = "".join(f"; did you mean {one}?" for one in known)
        return say_error(f"{name}: no command of dlrm{near or '; dlrm --help lists them'}", 2)
    text = texts[name]()
    return exit_code_of(lambda: show(text))


def run(command: Command, arguments: list[str]) -> int:
    """Runs a subcommand, with its own defaults; returns the exit code."""
    is_launched = command.launched is not None and "WORLD_SIZE" in os.environ
    name = (is_launched and command.launched) or command.module
    module = importlib.import_module(name)
    if hasattr(module, "__path__"):  # a package, whose command `python -m` runs as well
        module = importlib.import_module(f"{name}.__main__")
    defaults = {"defaults": command.defaults} if command.defaults else {}
    return module.main(arguments, **defaults) or 0


def program_of(module: str) -> str:
    """Returns the words that run a module in a shell: `dlrm cnn`.

    One that subcommands run with other defaults only has no shorter form than `python -m MODULE`.
    """
    names = [n for n, c in COMMANDS.items() if c.module == module and not c.defaults]
    return f"dlrm {names[0]}" if names else f"python -m {module}"


def help_text() -> str:
    """Returns the commands with their meanings, by group."""
    lines = ["Click-through models: from raw logs to a trained, tested and served model."]
    for group in dict.fromkeys(command.group for command in COMMANDS.values()):
        lines += ["", f"{group}:"]
        lines += [f"  {n:<19}{c.meaning}" for n, c in COMMANDS.items() if c.group == group]
    return "\n".join(
        [*lines, "", "dlrm COMMAND --help shows its flags; dlrm --version the versions."]
    )
