"""Inspects and converts checkpoints."""

from pathlib import Path
from typing import Any

from dlrm.command_line import say
from dlrm.documents import json_text, printable
from dlrm.files import MANIFEST
from dlrm.flags import Values
from dlrm.scripts.checkpoint.description import (
    describe,
    describe_run,
    lines_of_checkpoint,
    lines_of_run,
    open_any,
)
from dlrm.scripts.checkpoint.flags import CheckpointConfig
from dlrm.serving.network.recalibration import FOLDER as RECALIBRATION
from dlrm.train.checkpoints.nvidia import is_nvidia, write_nvidia
from dlrm.train.checkpoints.saved_model import write_saved


def run(values: Values) -> int:
    own = values.config(CheckpointConfig)
    commands = {
        "inspect": (_inspect, ("check", "weights", "json", "feature_order")),
        "convert": (_convert, ("to", "output", "feature_order", "interaction_padding")),
    }
    if own.command not in commands:
        raise ValueError(
            f"expected one of {', '.join(commands)}, got {own.command}; --help says more"
        )
    act, flags = commands[own.command]
    for other in values.given - {"command", "directory", *flags}:
        raise ValueError(f"--{other}: means nothing to {own.command}")
    return act(own, own.directory)


def _inspect(own: CheckpointConfig, path: Path) -> int:
    if path.is_dir() and not is_nvidia(path) and not (path / MANIFEST).exists():
        found = describe_run(path, own.check)
        lines = lines_of_run(found)
    else:
        found = describe(path, own.weights, own.feature_order, own.check)
        lines = lines_of_checkpoint(found)
    _show(found, lines, own)
    return 0


def _show(found: dict[str, Any], lines: list[str], own: CheckpointConfig) -> None:
    text = "\n".join(map(printable, lines))
    print(json_text(found, indent=2) if own.json else text)


def _convert(own: CheckpointConfig, source: Path) -> int:
    if not own.to or not own.output:
        raise ValueError("convert: expected --to nvidia or dlrm and --output DIR")
    reading = own.feature_order if own.to == "dlrm" else None
    saved = open_any(source, reading, check_crc=True)
    if saved.format == own.to:
        raise ValueError(f"{source}: of the format {own.to} already")
    if own.to == "dlrm":
        if own.interaction_padding:
            raise ValueError("--interaction_padding: means nothing to convert --to dlrm")
        write_saved(saved, own.output)
        for name, value in saved.notes.items():
            say(f"{name}: {value}")
        print("no optimizer state: NVIDIA's format has none, so training cannot be resumed from it")
    else:
        order = write_nvidia(saved, own.output, own.feature_order, own.interaction_padding)
        print(f"feature order: {order}")
        print("the state of optimizers is left out: NVIDIA's format has none")
        if saved.average:
            print("the EMA of the weights is left out, so scores differ: NVIDIA's format has none")
        if any(folder.name == RECALIBRATION for folder in saved.attached):
            print("the recalibration is left out: NVIDIA's format has none")
    rows = sum(table.rows for table in saved.tables)
    say(f"{own.output}: {len(saved.tables)} tables, {rows:,} rows, from {saved.path}")
    return 0
