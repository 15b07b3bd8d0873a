"""Subcommands and flags of `dlrm.scripts.checkpoint`."""

import csv
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import flags

from dlrm.command_line import say
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.documents import brief, printable
from dlrm.files import MANIFEST
from dlrm.scripts.checkpoint.comparison import compare, lines_of_diff
from dlrm.scripts.checkpoint.description import (
    describe,
    describe_run,
    lines_of_checkpoint,
    lines_of_run,
    open_any,
)
from dlrm.serving.network.recalibration import FOLDER as RECALIBRATION
from dlrm.tasks.table_rows import evict_rows, grow_tables
from dlrm.train.checkpoints.nvidia import FEATURE_ORDERS, PADDINGS, is_nvidia, write_nvidia
from dlrm.train.checkpoints.rows import STORES
from dlrm.train.checkpoints.saved_model import SavedModel, write_saved

FLAGS = flags.FLAGS
_FLAGS_OF = {
    "inspect": ("check", "weights", "json", "feature_order"),
    "diff": ("rtol", "atol", "weights_only", "json", "feature_order"),
    "convert": ("to", "output", "feature_order", "interaction_padding"),
    "grow": ("dataset", "table_sizes", "output"),
    "evict": ("rows", "output"),
}


def define_flags(values: flags.FlagValues = FLAGS) -> None:
    """Defines this script's flags."""
    flags.DEFINE_boolean(
        "json", False, "inspect, diff: print one JSON object, for programs", flag_values=values
    )
    flags.DEFINE_boolean(
        "check",
        False,
        "inspect: also compare the checksums of tables that are not read",
        flag_values=values,
    )
    flags.DEFINE_boolean(
        "weights",
        True,
        "inspect: read the weights and report their norms, NaN and infinities",
        flag_values=values,
    )
    flags.DEFINE_float("rtol", 0.0, "diff: relative tolerance", lower_bound=0, flag_values=values)
    flags.DEFINE_float("atol", 0.0, "diff: absolute tolerance", lower_bound=0, flag_values=values)
    flags.DEFINE_boolean(
        "weights_only", False, "diff: compare only the model's weights", flag_values=values
    )
    flags.DEFINE_enum(
        "to", None, ["nvidia", "dlrm"], "convert: format to write", flag_values=values
    )
    flags.DEFINE_string(
        "output", None, "convert, grow, evict: directory to write, new or empty", flag_values=values
    )
    flags.DEFINE_string(
        "dataset",
        None,
        "grow: dataset with the new table sizes, whose dictionaries begin with the checkpoint's",
        flag_values=values,
    )
    flags.DEFINE_list(
        "table_sizes", None, "grow: new number of rows of each table", flag_values=values
    )
    flags.DEFINE_string(
        "rows",
        None,
        "evict: CSV file with the header table,row, both counted from 0",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "feature_order",
        None,
        FEATURE_ORDERS,
        "Order of the vectors in NVIDIA's directory: natural (2020 on one GPU, or with "
        "--bottom_features_ordered on several), size_sorted (later versions on one GPU), "
        "device_mapping (of several GPUs). Default: as its metadata say; natural where one is "
        "written",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "interaction_padding",
        None,
        PADDINGS,
        "convert --to nvidia: zeros after the dots: one (versions of 2020), or to a multiple of 8 "
        "(later ones). Default: as in the directory that the model came from, else multiple_of_8",
        flag_values=values,
    )


def main(argv: list[str]) -> int:
    command, directories = _command(argv[1:])
    return command(*directories)


def _command(arguments: list[str]) -> tuple[Callable[..., int], list[Path]]:
    commands: dict[str, tuple[Callable[..., int], int]]
    commands = {
        "inspect": (_inspect, 1),
        "diff": (_diff, 2),
        "convert": (_convert, 1),
        "grow": (_grow, 1),
        "evict": (_evict, 1),
    }
    name = arguments[0] if arguments else "nothing"
    if name not in commands:
        raise ValueError(f"expected one of {', '.join(commands)}, got {name}; --help says more")
    command, count = commands[name]
    if len(arguments) != count + 1:
        raise ValueError(f"{name}: expected {count} directories, got {arguments[1:]}")
    for other in {flag for known in _FLAGS_OF.values() for flag in known} - {*_FLAGS_OF[name]}:
        if FLAGS[other].present:
            raise ValueError(f"--{other}: means nothing to {name}")
    return command, [Path(argument) for argument in arguments[1:]]


def _inspect(path: Path) -> int:
    if path.is_dir() and not is_nvidia(path) and not (path / MANIFEST).exists():
        found = describe_run(path, FLAGS.check)
        lines = lines_of_run(found)
    else:
        found = describe(path, FLAGS.weights, FLAGS.feature_order, FLAGS.check)
        lines = lines_of_checkpoint(found)
    text = "\n".join(map(printable, lines))
    print(json.dumps(_without_nan(found), indent=2) if FLAGS.json else text)
    return 0


def _diff(a: Path, b: Path) -> int:
    found = compare(a, b, FLAGS.rtol, FLAGS.atol, FLAGS.weights_only, FLAGS.feature_order)
    if FLAGS.json:
        print(json.dumps(_without_nan(found), indent=2))
    else:
        print("\n".join(map(printable, lines_of_diff(found))))
    return int(found["different"])


def _convert(source: Path) -> int:
    if not FLAGS.to or not FLAGS.output:
        raise ValueError("convert: expected --to nvidia or dlrm and --output DIR")
    reading = FLAGS.feature_order if FLAGS.to == "dlrm" else None
    saved = open_any(source, reading, check_crc=True)
    if saved.format == FLAGS.to and STORES not in saved.config:
        raise ValueError(f"{source}: of the format {FLAGS.to} already")
    if FLAGS.to == "dlrm":
        if FLAGS.interaction_padding:
            raise ValueError("--interaction_padding: means nothing to convert --to dlrm")
        write_saved(saved, FLAGS.output)
        for name, value in saved.notes.items():
            say(f"{name}: {value}")
        why = "NVIDIA's format has none" if saved.format == "nvidia" else "it stays in the store"
        print(f"no optimizer state: {why}, so training cannot be resumed from it")
    else:
        order = write_nvidia(saved, FLAGS.output, FLAGS.feature_order, FLAGS.interaction_padding)
        print(f"feature order: {order}")
        print("the state of optimizers is left out: NVIDIA's format has none")
        if saved.average:
            print("the EMA of the weights is left out, so scores differ: NVIDIA's format has none")
        if any(folder.name == RECALIBRATION for folder in saved.attached):
            print("the recalibration is left out: NVIDIA's format has none")
    rows = sum(table.rows for table in saved.tables)
    say(f"{FLAGS.output}: {len(saved.tables)} tables, {rows:,} rows, from {saved.path}")
    return 0


def _grow(source: Path) -> int:
    if not FLAGS.output or bool(FLAGS.dataset) == bool(FLAGS.table_sizes):
        raise ValueError("grow: expected --dataset DIR or --table_sizes, and --output DIR")
    saved = _own_checkpoint(source)
    if FLAGS.dataset:
        sizes = FeatureSpec.load(FLAGS.dataset).cardinalities
    else:
        sizes = [_number(size, "--table_sizes") for size in FLAGS.table_sizes]
    if note := grow_tables(saved, sizes, FLAGS.output, FLAGS.dataset):
        say(note)
    added = sum(sizes) - sum(table.rows for table in saved.tables[: len(sizes)])
    say(f"{FLAGS.output}: {added:,} rows appended to the tables of {saved.path}")
    return 0


def _evict(source: Path) -> int:
    if not FLAGS.output or not FLAGS.rows:
        raise ValueError("evict: expected --rows FILE and --output DIR")
    saved, rows = _own_checkpoint(source), _read_rows(FLAGS.rows)
    evict_rows(saved, rows, FLAGS.output)
    count = sum(len(set(own)) for own in rows.values())
    say(f"{FLAGS.output}: {count:,} rows of the tables of {saved.path} begin anew")
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


def _without_nan(value: Any) -> Any:
    """Returns the same with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
