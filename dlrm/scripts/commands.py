"""All commands of `dlrm`, by the names of its subcommands: dlrm train --dataset DIR ...

Each is a module with a function `main`, which is imported once the command is chosen. Modules
under NVIDIA's names, such as `dlrm.scripts.main`, run by `python -m` as well.
"""

import difflib
import importlib
import os
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from dlrm.command_line import end_while_imported, exit_code_of, say_error, show

_NONE: Mapping[str, Any] = MappingProxyType({})


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
    defaults: Mapping[str, Any] = _NONE
    launched: str | None = None


_DATA, _MODELS, _SERVING = "Prepare data", "Train and judge models", "Serve models"
_OTHERS, _TRY, _NVIDIA = "Image networks and BERT", "Try and measure", "NVIDIA's formats"
_MAIN, _DIST_MAIN = "dlrm.scripts.main", "dlrm.scripts.dist_main"
_SHORT = {"log_format": "short"}

COMMANDS = {
    "schema": Command(_DATA, "dlrm.scripts.schema", "draft a schema from tables"),
    "prepare": Command(_DATA, "dlrm.scripts.prepare", "turn tables or logs into a dataset"),
    "convert": Command(_DATA, "dlrm.scripts.convert", "convert a dataset to Parquet"),
    "train": Command(_MODELS, _MAIN, "train a model", _SHORT | {"mode": "train"}, _DIST_MAIN),
    "test": Command(_MODELS, _MAIN, "test a checkpoint", _SHORT | {"mode": "test"}, _DIST_MAIN),
    "evaluate": Command(
        _MODELS, "dlrm.scripts.evaluate", "judge a model on new rows, or two models"
    ),
    "predict": Command(_MODELS, "dlrm.scripts.predict", "score rows with a model"),
    "tune": Command(_MODELS, "dlrm.scripts.tune", "search for better settings"),
    "daily": Command(_MODELS, "dlrm.scripts.daily", "learn a log day by day, judged on each day"),
    "checkpoint": Command(_MODELS, "dlrm.scripts.checkpoint", "inspect or convert checkpoints"),
    "export": Command(_SERVING, "dlrm.deployment.export", "write a model repository for Triton"),
    "serve": Command(_SERVING, "dlrm.deployment.server", "run a Triton server"),
    "client": Command(_SERVING, "dlrm.deployment.client", "send rows to a Triton server"),
    "demo": Command(_TRY, "dlrm.scripts.demo", "run all steps on generated logs"),
    "doctor": Command(_TRY, "dlrm.scripts.doctor", "check this installation and machine"),
    "simulate": Command(
        _TRY, "dlrm.scripts.simulate_logs", "write click logs whose best AUC is known"
    ),
    "synthetic": Command(
        _TRY, "dlrm.scripts.prepare_synthetic_dataset", "write a dataset of random rows"
    ),
    "systems": Command(_TRY, "dlrm.published.command", "list and run published benchmarks"),
    "cnn": Command(_OTHERS, "dlrm.scripts.cnn", "train, validate or time ResNet and others"),
    "bert": Command(_OTHERS, "dlrm.scripts.bert", "train, evaluate or time BERT"),
    "prepare-images": Command(
        _OTHERS, "dlrm.vision.preparation.command", "turn images into a dataset for cnn"
    ),
    "prepare-text": Command(
        _OTHERS, "dlrm.language.pretraining.command", "turn text into a dataset for bert"
    ),
    "prepare-logs": Command(
        _NVIDIA, "dlrm.preproc.logs.prepare_logs", "turn Criteo's logs into a dataset, step by step"
    ),
    "transcode": Command(
        _NVIDIA, "dlrm.scripts.transcode", "turn NVIDIA's CSV files into a dataset"
    ),
    "split-dataset": Command(
        _NVIDIA, "dlrm.scripts.split_dataset", "split a binary dataset into a file per feature"
    ),
    "gen-csv": Command(_NVIDIA, "dlrm.scripts.gen_csv", "write random CSV files for transcode"),
}


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code.

    Args:
        arguments: words after `dlrm`; by default those of this process.
    """
    if arguments is None:
        end_while_imported("__main__")
        arguments = sys.argv[1:]
    name, *own = arguments or ["--help"]
    if name in COMMANDS:
        return run(COMMANDS[name], own)
    texts = {"--help": help_text, "-h": help_text, "--version": _version}
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


def _version() -> str:
    from dlrm.flags import version_line  # absl takes longer to import than this module

    return version_line()
