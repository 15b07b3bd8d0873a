"""Inspects, compares and converts checkpoints, and changes the rows of their tables."""

import csv
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from dlrm.command_line import say
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.documents import brief, json_text, printable
from dlrm.files import MANIFEST
from dlrm.flags import Values
from dlrm.preproc.increments.inspection import inspect_chain, lines_of_chain
from dlrm.scripts.checkpoint.comparison import compare, lines_of_diff
from dlrm.scripts.checkpoint.description import (
    describe,
    describe_run,
    lines_of_checkpoint,
    lines_of_run,
    open_any,
)
from dlrm.scripts.checkpoint.flags import CheckpointConfig
from dlrm.serving.network.recalibration import FOLDER as RECALIBRATION
from dlrm.tasks.table_rows import evict_rows, grow_tables
from dlrm.train.checkpoints.nvidia import is_nvidia, write_nvidia
from dlrm.train.checkpoints.saved_model import SavedModel, write_saved


class _Command(NamedTuple):
    """A function of the options and of some directories, and the flags that it reads."""

    act: Callable[..., int]
    directories: int
    flags: tuple[str, ...]


def run(values: Values) -> int:
    own = values.config(CheckpointConfig)
    commands = {
        "inspect": _Command(_inspect, 1, ("check", "weights", "json", "feature_order", "chain")),
        "diff": _Command(_diff, 2, ("rtol", "atol", "weights_only", "json", "feature_order")),
        "convert": _Command(_convert, 1, ("to", "output", "feature_order", "interaction_padding")),
        "grow": _Command(_grow, 1, ("dataset", "table_sizes", "output")),
        "evict": _Command(_evict, 1, ("rows", "output")),
    }
    if own.command not in commands:
        raise ValueError(
            f"expected one of {', '.join(commands)}, got {own.command}; --help says more"
        )
    command = commands[own.command]
    if len(own.directories) != command.directories:
        got = " ".join(map(str, own.directories)) or "none"
        raise ValueError(f"{own.command}: expected {command.directories} directories, got {got}")
    for other in values.given - {"command", "directories", *command.flags}:
        raise ValueError(f"--{other}: means nothing to {own.command}")
    return command.act(own, *own.directories)


def _inspect(own: CheckpointConfig, path: Path) -> int:
    if own.chain:
        found = inspect_chain(path)
        _show(found, lines_of_chain(found), own)
        return int(bool(found["faults"]))
    if path.is_dir() and not is_nvidia(path) and not (path / MANIFEST).exists():
        found = describe_run(path, own.check)
        lines = lines_of_run(found)
    else:
        found = describe(path, own.weights, own.feature_order, own.check)
        lines = lines_of_checkpoint(found)
    _show(found, lines, own)
    return 0


def _diff(own: CheckpointConfig, a: Path, b: Path) -> int:
    found = compare(a, b, own.rtol, own.atol, own.weights_only, own.feature_order)
    _show(found, lines_of_diff(found), own)
    return int(found["different"])


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


def _grow(own: CheckpointConfig, source: Path) -> int:
    if not own.output or bool(own.dataset) == bool(own.table_sizes):
        raise ValueError("grow: expected --dataset DIR or --table_sizes, and --output DIR")
    saved = _own_checkpoint(source)
    if own.dataset:
        sizes = FeatureSpec.load(own.dataset).cardinalities
    else:
        sizes = list(own.table_sizes or ())
    if note := grow_tables(saved, sizes, own.output, own.dataset):
        say(note)
    of_fields = saved.config["dataset"].get("field tables") or range(len(sizes))
    after = dict(zip(of_fields, sizes, strict=True))
    added = sum(rows - saved.tables[table].rows for table, rows in after.items())
    say(f"{own.output}: {added:,} rows appended to the tables of {saved.path}")
    return 0


def _evict(own: CheckpointConfig, source: Path) -> int:
    if not own.output or not own.rows:
        raise ValueError("evict: expected --rows FILE and --output DIR")
    saved, rows = _own_checkpoint(source), _read_rows(own.rows)
    evict_rows(saved, rows, own.output)
    count = sum(len(set(own)) for own in rows.values())
    say(f"{own.output}: {count:,} rows of the tables of {saved.path} begin anew")
    return 0


def _own_checkpoint(source: Path) -> SavedModel:
    saved = open_any(source, check_crc=True)
    if saved.format != "dlrm":
        raise ValueError(f"{source}: of NVIDIA's format; convert --to dlrm comes first")
    return saved


def _read_rows(path: str) -> dict[int, list[int]]:
    """Reads the tables and rows that a file lists."""
    found: dict[int, list[int]] = {}
    with open(path, newline="", encoding="utf-8") as file:
        for line, cells in enumerate(csv.reader(file), 1):
            if line == 1:
                if cells != ["table", "row"]:
                    raise ValueError(f"{path}: line 1: expected table,row, got {brief(cells)}")
                continue
            if len(cells) != 2:
                raise ValueError(f"{path}: line {line}: expected table,row, got {brief(cells)}")
            table, row = (_number(cell, f"{path}: line {line}") for cell in cells)
            found.setdefault(table, []).append(row)
    return found


def _number(text: str, where: str) -> int:
    if not re.fullmatch("[0-9]{1,18}", text):
        raise ValueError(f"{where}: expected a number, got {brief(text)}")
    return int(text)
