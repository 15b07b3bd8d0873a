"""Inspects, compares and converts checkpoints, and changes the rows of their tables.

    python -m dlrm.scripts.checkpoint inspect DIR [--check] [--noweights] [--json]
    python -m dlrm.scripts.checkpoint diff A B [--rtol 1e-5] [--atol 1e-6] [--weights_only] [--json]
    python -m dlrm.scripts.checkpoint convert --to nvidia|dlrm --output OUT SRC
    python -m dlrm.scripts.checkpoint grow --dataset DIR | --table_sizes 10,20 --output OUT SRC
    python -m dlrm.scripts.checkpoint evict --rows FILE --output OUT SRC

grow appends rows to tables, for ids that a later dictionary appends; evict initializes rows again,
for other ids. Both keep everything else, including the state of optimizers.

`convert --to dlrm` also writes the rows of a checkpoint that are in a --table_store into files.

A directory is a checkpoint, a run's directory of checkpoints (whose best or else last one is used,
while inspect lists all), or a directory that NVIDIA's PyTorch DLRM saved. Large tables are read
some megabytes at a time, and no code in a file is run.

The exit code is 0; 1 if diff finds a difference; 2 after an error, which is printed.
"""

import csv
import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from absl import app, flags

from dlrm.command_line import fail
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.documents import brief
from dlrm.files import MANIFEST, in_use
from dlrm.model.dlrm import ARCHITECTURE
from dlrm.scripts.bert import flags as bert_flags
from dlrm.scripts.cnn import flags as cnn_flags
from dlrm.scripts.common.command import parse_flags
from dlrm.serving.recalibration import FOLDER as RECALIBRATION
from dlrm.tasks.table_rows import evict_rows, grow_tables
from dlrm.train.checkpoints.diff import (
    difference,
    map_differences,
    shape_of,
    statistics,
    weights_of,
)
from dlrm.train.checkpoints.directory import (
    all_checkpoints,
    best_checkpoint,
    best_record,
    find_checkpoint,
)
from dlrm.train.checkpoints.nvidia import (
    FEATURE_ORDERS,
    PADDINGS,
    is_nvidia,
    read_nvidia,
    write_nvidia,
)
from dlrm.train.checkpoints.rows import STORES
from dlrm.train.checkpoints.saved_model import SavedModel, read_saved, write_saved

FLAGS = flags.FLAGS
_FLAGS_OF = {
    "inspect": ("check", "weights", "json", "feature_order"),
    "diff": ("rtol", "atol", "weights_only", "json", "feature_order"),
    "convert": ("to", "output", "feature_order", "interaction_padding"),
    "grow": ("dataset", "table_sizes", "output"),
    "evict": ("rows", "output"),
}
# Flags of any network that determine the shapes of its weights.
_ARCHITECTURES = dict.fromkeys((*ARCHITECTURE, *cnn_flags.ARCHITECTURE, *bert_flags.ARCHITECTURE))
_SHOWN = 5  # number of tensors that diff shows for different networks
# Flags about locations, and about whether a run was resumed, that do not describe the model.
_PLACES = (
    *("save_checkpoint_path", "load_checkpoint_path", "log_path", "resume"),
    *("table_memory", "table_store"),
)


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
        "dataset", None, "grow: dataset with the new table sizes", flag_values=values
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
    try:
        command, directories = _command(argv[1:])
        return command(*directories)
    except (ValueError, OSError) as error:
        fail(error, 2)


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


def open_any(
    path: Path, feature_order: str | None = None, any_order: bool = False, check_crc: bool = False
) -> SavedModel:
    """Opens a checkpoint of ours or a directory of NVIDIA's.

    Args:
        path: the directory.
        feature_order, any_order: see `read_nvidia`.
        check_crc: see `read_saved`.

    Raises:
        FileNotFoundError, ValueError: it is neither, or damaged; the message names the file.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such directory")
    if is_nvidia(path):
        return read_nvidia(path, feature_order, any_order)
    return read_saved(find_checkpoint(path), check_crc)


def _inspect(path: Path) -> int:
    if path.is_dir() and not is_nvidia(path) and not (path / MANIFEST).exists():
        found = describe_run(path, FLAGS.check)
        lines = _lines_of_run(found)
    else:
        found = describe(path, FLAGS.weights, FLAGS.feature_order, FLAGS.check)
        lines = _lines_of_checkpoint(found)
    print(json.dumps(_without_nan(found), indent=2) if FLAGS.json else "\n".join(lines))
    return 0


def describe_run(path: Path, check_crc: bool = False) -> dict[str, Any]:
    """Returns a description of a run's directory of checkpoints, as JSON values."""
    best = best_checkpoint(path)
    checkpoints = []
    for directory in all_checkpoints(path):
        with in_use(directory) as stays:
            if stays:
                saved = read_saved(directory, check_crc)
                progress = _progress(saved)
                if not progress["metrics"] and best is not None and best.name == directory.name:
                    progress["metrics"] = _metrics(best_record(path))  # tested after it was saved
                checkpoints.append(
                    {
                        "name": directory.name,
                        **progress,
                        "bytes": _bytes(directory),
                        "best": best is not None and best.name == directory.name,
                    }
                )
    if not checkpoints:
        raise FileNotFoundError(f"{path}: no checkpoint here (expected {MANIFEST} or step-*/)")
    return {
        "path": str(path),
        "format": "run",
        "crc_checked": check_crc,
        "checkpoints": checkpoints,
    }


def describe(
    path: Path, weights: bool = True, feature_order: str | None = None, check_crc: bool = False
) -> dict[str, Any]:
    """Returns a description of a checkpoint, as JSON values.

    Args:
        path: the checkpoint.
        weights: read them, for their statistics.
        feature_order: see `read_nvidia`.
        check_crc: compare the CRC-32 of every file of ours.
    """
    saved = open_any(path, feature_order, any_order=True, check_crc=check_crc or weights)
    if check_crc and saved.format == "nvidia":
        raise ValueError(f"{path}: NVIDIA's directories have no CRC-32 to compare")
    saved_flags = saved.config.get("flags", {})
    dense = weights_of(saved, with_state=False)
    for index in range(len(saved.tables)):
        del dense[f"table {index}"]
    first = dense.get("bottom_mlp.0.weight")
    return {
        "path": str(saved.path),
        "format": saved.format,
        "bytes": _bytes(saved.path),
        "crc_checked": check_crc,
        **_progress(saved),
        "dlrm_version": saved.config.get("dlrm_version"),
        "architecture": {
            "num_numerical_features": None if first is None else shape_of(first)[1],
            **{name: saved_flags[name] for name in ARCHITECTURE if name in saved_flags},
        },
        "notes": saved.notes,
        "dataset": {"path": saved_flags.get("dataset"), **saved.config.get("dataset", {})},
        "optimizers": saved.config.get("optimizers", []),
        "optimizer_values": sum(tensor.numel() for tensor in saved.optimizer.values()),
        "attached": [folder.name for folder in saved.attached],
        "tables": [_described_table(saved, index, weights) for index in range(len(saved.tables))],
        "dense": {
            name: {"shape": shape_of(tensor), **(asdict(statistics(tensor)) if weights else {})}
            for name, tensor in dense.items()
        },
    }


def _described_table(saved: SavedModel, index: int, weights: bool) -> dict[str, Any]:
    table, state = saved.tables[index], saved.table_state[index] if saved.table_state else {}
    return {
        "rows": table.rows,
        "dim": table.dim,
        "bytes": 4 * table.rows * table.dim,
        "state": {name: 4 * rows.rows * rows.dim for name, rows in state.items()},
        **(asdict(statistics(table)) if weights else {}),
    }


def _diff(a: Path, b: Path) -> int:
    found = compare(a, b, FLAGS.rtol, FLAGS.atol, FLAGS.weights_only, FLAGS.feature_order)
    if FLAGS.json:
        print(json.dumps(_without_nan(found), indent=2))
    else:
        print("\n".join(_lines_of_diff(found)))
    return int(found["different"])


def compare(
    a: Path,
    b: Path,
    rtol: float = 0.0,
    atol: float = 0.0,
    weights_only: bool = False,
    feature_order: str | None = None,
) -> dict[str, Any]:
    """Returns the differences of two checkpoints, as JSON values.

    Entries of only one format, such as optimizer state, are not compared between two formats, and
    the places where a run wrote its files are never compared.

    Args:
        a, b: their directories.
        rtol, atol: weights differ if |a - b| > atol + rtol * |b|.
        weights_only: leave out configuration, progress and optimizer state.
        feature_order: order of NVIDIA's directories, overriding their metadata.
    """
    one, other = (open_any(path, feature_order, check_crc=True) for path in (a, b))
    same_format = one.format == other.format
    with_state = same_format and not weights_only
    left, right = weights_of(one, with_state), weights_of(other, with_state)
    shapes: dict[str, list[Any]] = {}
    if bool(_state_in(left)) != bool(_state_in(right)):
        shapes["state of optimizers"] = [len(_state_in(side)) or None for side in (left, right)]
        left, right = _without_state(left), _without_state(right)
    other_shapes, tensors = _weight_differences(left, right, rtol, atol)
    shapes |= other_shapes
    config: list[str] = []
    progress: list[str] = []
    if not weights_only:
        leave_out = {"tables", STORES} if same_format else {"tables", "optimizers", STORES}
        mine, theirs = (_without_places(saved.config, leave_out) for saved in (one, other))
        config = list(map_differences(mine, theirs, common=not same_format))
        progress = list(map_differences(_progress(one), _progress(other)))
    return {
        "a": str(one.path),
        "b": str(other.path),
        "different": bool(shapes or tensors or config or progress),
        "architecture": _architectures(one, other) if shapes else {},
        "config": config,
        "progress": progress,
        "shapes": shapes,
        "weights": tensors,
        "compared": len(left.keys() & right.keys()),
        "with_state": with_state,
    }


def _weight_differences(
    left: dict[str, Any], right: dict[str, Any], rtol: float, atol: float
) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Returns the differing shapes, and, for equal shapes, the differences of values."""
    shapes, tensors = {}, {}
    for name in {**left, **right}:
        sizes = [shape_of(side[name]) if name in side else None for side in (left, right)]
        if sizes[0] != sizes[1]:
            shapes[name] = sizes
        elif apart := difference(left[name], right[name], rtol, atol):
            tensors[name] = asdict(apart)
    return shapes, tensors


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
            print(f"{name}: {value}")
        why = "NVIDIA's format has none" if saved.format == "nvidia" else "it stays in the store"
        print(f"no optimizer state: {why}, so training cannot be resumed from it")
    else:
        order = write_nvidia(saved, FLAGS.output, FLAGS.feature_order, FLAGS.interaction_padding)
        print(f"feature order: {order}")
        print("the state of optimizers is left out: NVIDIA's format has none")
        if any(folder.name == RECALIBRATION for folder in saved.attached):
            print("the recalibration is left out: NVIDIA's format has none")
    rows = sum(table.rows for table in saved.tables)
    print(f"{FLAGS.output}: {len(saved.tables)} tables, {rows:,} rows, from {saved.path}")
    return 0


def _grow(source: Path) -> int:
    if not FLAGS.output or bool(FLAGS.dataset) == bool(FLAGS.table_sizes):
        raise ValueError("grow: expected --dataset DIR or --table_sizes, and --output DIR")
    saved = _own_checkpoint(source)
    if FLAGS.dataset:
        sizes = FeatureSpec.load(FLAGS.dataset).cardinalities
    else:
        sizes = [_number(size, "--table_sizes") for size in FLAGS.table_sizes]
    grow_tables(saved, sizes, FLAGS.output)
    added = sum(sizes) - sum(table.rows for table in saved.tables[: len(sizes)])
    print(f"{FLAGS.output}: {added:,} rows appended to the tables of {saved.path}")
    return 0


def _evict(source: Path) -> int:
    if not FLAGS.output or not FLAGS.rows:
        raise ValueError("evict: expected --rows FILE and --output DIR")
    saved, rows = _own_checkpoint(source), _read_rows(FLAGS.rows)
    evict_rows(saved, rows, FLAGS.output)
    count = sum(len(set(own)) for own in rows.values())
    print(f"{FLAGS.output}: {count:,} rows of the tables of {saved.path} begin anew")
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


def _architectures(one: SavedModel, other: SavedModel) -> dict[str, list[Any]]:
    """Returns the differing architecture flags that both were saved with, with both values."""
    a, b = (saved.config.get("flags", {}) for saved in (one, other))
    known = [name for name in _ARCHITECTURES if name in a and name in b]
    return {name: [a[name], b[name]] for name in known if a[name] != b[name]}


def _without_places(config: dict[str, Any], leave_out: set[str]) -> dict[str, Any]:
    kept = {name: value for name, value in config.items() if name not in leave_out}
    if "flags" in kept:
        kept["flags"] = {k: v for k, v in kept["flags"].items() if k not in _PLACES}
    return kept


def _state_in(weights: dict[str, Any]) -> list[str]:
    return [n for n in weights if n.startswith("optimizer ") or n.startswith("table ") and "," in n]


def _without_state(weights: dict[str, Any]) -> dict[str, Any]:
    state = {*_state_in(weights)}
    return {name: value for name, value in weights.items() if name not in state}


def _progress(saved: SavedModel) -> dict[str, Any]:
    """Returns the step, its metrics, and those of the best step so far."""
    step, best = saved.progress.get("step"), dict(saved.progress.get("best") or {})
    history = saved.progress.get("history") or []
    tested = [entry for entry in history if "lr" not in entry and entry.get("step") == step]
    if best and best.get("step") == step:
        tested.append(best)
    return {
        "step": step,
        "metrics": _metrics(tested[-1]) if tested else {},
        "best_so_far": {
            "step": best.get("step"),
            "epoch": best.get("epoch"),
            "metrics": _metrics(best),
        },
    }


def _metrics(record: dict[str, float]) -> dict[str, float]:
    """Returns the metrics of a record, without its step and epoch."""
    return {name: value for name, value in record.items() if name not in ("step", "epoch")}


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _lines_of_run(found: dict[str, Any]) -> list[str]:
    checked = ", the CRC-32 of every file is right" if found["crc_checked"] else ""
    count = len(found["checkpoints"])
    lines = [f"{found['path']}: {count} checkpoint{'s' * (count > 1)}{checked}"]
    for checkpoint in found["checkpoints"]:
        mark = "  <- best" if checkpoint["best"] else ""
        lines.append(
            f"  {checkpoint['name']}  {_size(checkpoint['bytes'])}  "
            f"{_shown(checkpoint['metrics']) or 'not tested at this step'}{mark}"
        )
    return lines


def _shown(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.6f}" for name, value in metrics.items())


def _lines_of_checkpoint(found: dict[str, Any]) -> list[str]:
    best = found["best_so_far"]
    architecture = "  ".join(f"{k} {_short(v)}" for k, v in found["architecture"].items())
    lines = [
        f"{found['path']}: a checkpoint of {found['format']}, {_size(found['bytes'])}"
        + (", the CRC-32 of every file is right" if found["crc_checked"] else ""),
        f"step {found['step']}: {_shown(found['metrics']) or 'not tested at this step'}",
        f"best so far: step {best['step']}, epoch {best['epoch']}  {_shown(best['metrics'])}"
        if best["metrics"]
        else "best so far: nothing tested",
        f"architecture: {architecture}",
        *(f"{name}: {note}" for name, note in found["notes"].items()),
        "dataset: " + "  ".join(f"{k} {_short(v)}" for k, v in found["dataset"].items()),
        f"optimizers: {', '.join(found['optimizers']) or 'none'}",
    ]
    if found["attached"]:
        lines.append(f"with it: {', '.join(found['attached'])}")
    lines += ["", f"{'':<24} {'shape':>16}  {'size':>10}  norms of rows: least, mean, most"]
    for index, table in enumerate(found["tables"]):
        state = "".join(f"  {name} {_size(size)}" for name, size in table["state"].items())
        shape = [table["rows"], table["dim"]]
        lines.append(_line(f"table {index}", shape, table["bytes"], table) + state)
    for name, tensor in found["dense"].items():
        lines.append(_line(name, tensor["shape"], 4 * math.prod(tensor["shape"]), tensor))
    weights = [*found["tables"], *found["dense"].values()]
    wrong = sum(w.get("num_nan", 0) + w.get("num_inf", 0) for w in weights)
    if all("num_nan" in w for w in weights):
        lines.append(f"\nvalues that are NaN or infinite: {wrong or 'none'}")
    return lines


def _line(name: str, shape: list[int], size: int, found: dict[str, Any]) -> str:
    shown = " x ".join(f"{n:,}" for n in shape)
    line = f"{name:<24} {shown:>16}  {_size(size):>10}"
    if "norm_min" in found:
        line += "  " + ", ".join(f"{found[f'norm_{k}']:.4g}" for k in ("min", "mean", "max"))
        if found["num_nan"] or found["num_inf"]:
            line += f"  {found['num_nan']} NaN, {found['num_inf']} infinite"
    return line


def _lines_of_diff(found: dict[str, Any]) -> list[str]:
    lines = [f"a: {found['a']}", f"b: {found['b']}"]
    if found["architecture"]:
        flags_of = found["architecture"].items()
        apart = "; ".join(f"--{name} {_short(a)} and {_short(b)}" for name, (a, b) in flags_of)
        lines.append(f"different architectures: {apart}")
    said = tuple(f"flags: {name}: " for name in found["architecture"])
    lines += [f"config: {line}" for line in found["config"] if not line.startswith(said)]
    lines += [f"progress: {line}" for line in found["progress"]]
    tensors = []
    for name, (one, other) in found["shapes"].items():
        shown = ("absent" if side is None else side for side in (one, other))
        tensors.append(f"{name}: {' and '.join(map(str, shown))}")
    for name, apart in found["weights"].items():
        tensors.append(
            f"{name}: {apart['rows']:,} of {apart['of']:,} rows differ, the first is "
            f"{apart['first']:,}; max difference {apart['max_abs']:.3g}, relative "
            f"{apart['max_rel']:.3g}"
        )
    of_other_networks = found["architecture"] or len(found["shapes"]) > _SHOWN
    if of_other_networks and (more := len(tensors[_SHOWN:])):
        tensors[_SHOWN:] = [f"and {more} more tensors that differ; --json has all"]
    lines += tensors
    if not tensors:
        state = " and state" if found["with_state"] else ""
        lines.append(f"weights{state}: {found['compared']} tensors, all the same")
    return lines


def _short(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"


def _without_nan(value: Any) -> Any:
    """Returns the same with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parse(arguments: list[str]) -> list[str]:
    """Parses flags; returns the rest. Errors exit with 2, since 1 is a result of diff."""
    try:
        return parse_flags(FLAGS, arguments)
    except (ValueError, OSError) as error:
        fail(error, 2)


if __name__ == "__main__":
    define_flags()
    app.run(main, flags_parser=parse)
