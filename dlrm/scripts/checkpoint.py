"""Inspects and converts checkpoints.

    dlrm checkpoint inspect DIR [--check] [--noweights] [--json]
    dlrm checkpoint convert --to nvidia|dlrm --output OUT SRC

A directory is a checkpoint, a run's directory of checkpoints (whose best or else last one is used,
while inspect lists all), or a directory that NVIDIA's PyTorch DLRM saved. Large tables are read
some megabytes at a time, and no code in a file is run.

The exit code is 0, or 2 after an error, which is printed.
"""

import importlib
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm.command_line import importing, say, text_of
from dlrm.documents import json_text, printable
from dlrm.files import MANIFEST
from dlrm.flags import ConfigFlags, Values, run_command
from dlrm.locks import in_use
from dlrm.settings import REQUIRED, check_settings, setting

if TYPE_CHECKING:
    import numpy as np

    from dlrm.train.checkpoints.checkpoint import Checkpoint

FEATURE_ORDERS = ("natural", "size_sorted", "device_mapping")
PADDINGS = ("one", "multiple_of_8")


@dataclass(frozen=True)
class CheckpointConfig:
    """A task and its options; field names are those of the flags."""

    command: str = setting(REQUIRED, "inspect or convert", positional=True)
    directory: Path = setting(
        REQUIRED,
        "checkpoint to inspect or convert",
        positional=True,
        uri="read, *",  # also all checkpoints of a run
    )
    json: bool = setting(False, "inspect: print one JSON object, for programs")
    check: bool = setting(False, "inspect: also compare the checksums of tables that are not read")
    weights: bool = setting(
        True, "inspect: read the weights and report their norms, NaN and infinities"
    )
    to: str | None = setting(None, "convert: format to write", choices=("nvidia", "dlrm"))
    output: str | None = setting(None, "convert: directory to write, new or empty", uri="write")
    feature_order: str | None = setting(
        None,
        "Order of the vectors in NVIDIA's directory: natural (2020 on one GPU, or with "
        "--bottom_features_ordered on several), size_sorted (later versions on one GPU), "
        "device_mapping (of several GPUs). Default: as its metadata say; where one is written, as "
        "in the directory that the model came from, else size_sorted",
        choices=FEATURE_ORDERS,
    )
    interaction_padding: str | None = setting(
        None,
        "convert --to nvidia: zeros after the dots: one (versions of 2020), or to a multiple of 8 "
        "(later ones). Default: as in the directory that the model came from, else multiple_of_8",
        choices=PADDINGS,
    )

    def __post_init__(self) -> None:
        check_settings(self)


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    line = ConfigFlags([("Flags", CheckpointConfig)])
    return run_command(line, _run, __doc__, arguments, code=2)


def _run(values: Values) -> int:
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
    with importing():
        importlib.import_module("dlrm.train.checkpoints.checkpoint")  # and torch
    act(own)
    return 0


def _inspect(own: CheckpointConfig) -> None:
    from dlrm.train.checkpoints.nvidia import is_nvidia

    path = own.directory
    if path.is_dir() and not is_nvidia(path) and not (path / MANIFEST).exists():
        found = describe_run(path, own.check)
        lines = _lines_of_run(found)
    else:
        found = describe(path, own.weights, own.feature_order, own.check)
        lines = _lines_of_checkpoint(found)
    if own.check:
        lines.append("the CRC-32 of every file is right")
    text = "\n".join(map(printable, lines))
    print(json_text(found, indent=2) if own.json else text)


def _convert(own: CheckpointConfig) -> None:
    from dlrm.train.checkpoints.nvidia import write_nvidia

    if not own.to or not own.output:
        raise ValueError("convert: expected --to nvidia or dlrm and --output DIR")
    saved = _opened(own.directory, own.feature_order if own.to == "dlrm" else None)
    if saved.format == own.to:
        raise ValueError(f"{own.directory}: of the format {own.to} already")
    saved.verify()
    if own.to == "dlrm":
        if own.interaction_padding:
            raise ValueError("--interaction_padding: means nothing to convert --to dlrm")
        saved.copy(own.output)
        for name, value in saved.notes.items():
            say(f"{name}: {value}")
        print("no optimizer state: NVIDIA's format has none, so training cannot be resumed from it")
    else:
        order = write_nvidia(saved, own.output, own.feature_order, own.interaction_padding)
        print(f"feature order: {order}")
        print("left out, as NVIDIA's format has none: the state of optimizers, a recalibration")
    rows = sum(table.rows for table in saved.tables)
    say(f"{own.output}: {len(saved.tables)} tables, {rows:,} rows, from {saved.path}")


def _opened(path: Path, feature_order: str | None) -> "Checkpoint":
    from dlrm.train.checkpoints.checkpoint import Checkpoint

    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such directory")
    return Checkpoint(Checkpoint.open(path).path, feature_order)


def describe_run(path: Path, check_crc: bool = False) -> dict[str, Any]:
    """Returns a description of a run's directory of checkpoints, as JSON values.

    Raises:
        FileNotFoundError, ValueError: there is no checkpoint, or one is damaged.
    """
    from dlrm.train.checkpoints import directory
    from dlrm.train.checkpoints.checkpoint import Checkpoint

    best, checkpoints = directory.best_checkpoint(path), []
    for place in directory.all_checkpoints(path):
        with in_use(place) as stays:
            if stays:
                saved = Checkpoint(place)
                saved.verify(lambda name: check_crc or not name.startswith("tables/"))
                is_best = best is not None and best.name == place.name
                progress = _progress(saved)
                if is_best and not progress["metrics"]:  # it was tested after it was saved
                    progress["metrics"] = _metrics(directory.best_record(path))
                size = {"bytes": _bytes(place), "best": is_best}
                checkpoints.append({"name": place.name, **progress, **size})
    if not checkpoints:
        raise FileNotFoundError(f"{path}: no checkpoint here (expected {MANIFEST} or step-*/)")
    return {"path": str(path), "format": "run", "checkpoints": checkpoints}


def describe(
    path: Path, weights: bool = True, feature_order: str | None = None, check_crc: bool = False
) -> dict[str, Any]:
    """Returns a description of a checkpoint, as JSON values.

    Args:
        weights: read them, for their statistics.
        feature_order: see `read_nvidia`.
        check_crc: compare the CRC-32 of every file of ours.

    Raises:
        FileNotFoundError, ValueError: it is none, or damaged; the message names the file.
    """
    from dlrm.model.config import ARCHITECTURE
    from dlrm.tasks.run import CONTINUES

    saved = _opened(path, feature_order)
    if check_crc and saved.format == "nvidia":
        raise ValueError(f"{path}: NVIDIA's directories have no CRC-32 to compare")
    saved.verify(lambda name: check_crc or weights or not name.startswith("tables/"))
    flags, tables, dense = saved.config["flags"], [], {}
    for table, state in zip(saved.tables, saved.table_state, strict=True):
        of_state = {name: 4 * rows.rows * rows.dim for name, rows in state.items()}
        size = {"bytes": 4 * table.rows * table.dim, "state": of_state}
        found = statistics(block for _, block in table.blocks()) if weights else {}
        tables.append({"rows": table.rows, "dim": table.dim, **size, **found})
    for name, tensor in sorted(saved.dense.items()):
        values = tensor.float().numpy().reshape(len(tensor) if tensor.ndim else 1, -1)
        dense[name] = {"shape": [*tensor.shape], **(statistics([values]) if weights else {})}
    first = saved.dense.get("bottom_mlp.0.weight")
    return {
        "path": str(saved.path),
        "format": saved.format,
        "bytes": _bytes(saved.path),
        **_progress(saved),
        "dlrm_version": saved.config.get("dlrm_version"),
        "architecture": {
            "num_numerical_features": None if first is None else first.shape[1],
            **{name: flags[name] for name in ARCHITECTURE if name in flags},
        },
        "notes": saved.notes,
        "dataset": {"path": flags.get("dataset"), **saved.config["dataset"]},
        "optimizers": saved.config["optimizers"],
        "optimizer_values": sum(tensor.numel() for tensor in saved.optimizer.values()),
        "continues": saved.config.get(CONTINUES),
        "attached": [folder.name for folder in saved.attached],
        "tables": tables,
        "dense": dense,
    }


def statistics(blocks: "Iterable[np.ndarray]") -> dict[str, float]:
    """Returns statistics of rows that come some at a time, `[some, dim]`.

    Returns:
        "norm_min", "norm_mean" and "norm_max" of the finite rows, and the numbers of values that
        are NaN and infinite.
    """
    import numpy as np

    low, high, total, num_rows, num_nan, num_inf = math.inf, 0.0, 0.0, 0, 0, 0
    for block in blocks:
        norms = np.linalg.norm(block.astype(np.float64), axis=1)
        norms = norms[np.isfinite(norms)]
        num_nan += int(np.isnan(block).sum())
        num_inf += int(np.isinf(block).sum())
        low = min(low, float(norms.min(initial=math.inf)))
        high = max(high, float(norms.max(initial=0)))
        total, num_rows = total + float(norms.sum()), num_rows + len(norms)
    norm = {"min": low if num_rows else 0.0, "mean": total / max(num_rows, 1), "max": high}
    found = {f"norm_{name}": value for name, value in norm.items()}
    return {**found, "num_nan": num_nan, "num_inf": num_inf}


def _progress(saved: "Checkpoint") -> dict[str, Any]:
    """Returns the step, its metrics, and those of the best step so far."""
    step, best = saved.progress.get("step"), saved.progress.get("best") or {}
    history = saved.progress.get("history") or []
    tested = [entry for entry in history if "lr" not in entry and entry.get("step") == step]
    if best and best.get("step") == step:
        tested.append(best)
    so_far = {"step": best.get("step"), "epoch": best.get("epoch"), "metrics": _metrics(best)}
    metrics = _metrics(tested[-1]) if tested else {}
    return {"step": step, "metrics": metrics, "best_so_far": so_far}


def _metrics(record: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in record.items() if name not in ("step", "epoch")}


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _lines_of_run(found: Mapping[str, Any]) -> list[str]:
    from dlrm.metrics.table import line_of

    count = len(found["checkpoints"])
    lines = [f"{found['path']}: {count} checkpoint{'s' * (count > 1)}"]
    for checkpoint in found["checkpoints"]:
        metrics = line_of(checkpoint["metrics"]) or "not tested at this step"
        mark = "  <- best" if checkpoint["best"] else ""
        lines.append(f"  {checkpoint['name']}  {_size(checkpoint['bytes'])}  {metrics}{mark}")
    return lines


def _lines_of_checkpoint(found: Mapping[str, Any]) -> list[str]:
    from dlrm.metrics.table import line_of

    best = found["best_so_far"]
    architecture, dataset = (
        "  ".join(f"{name} {text_of(value)}" for name, value in found[part].items())
        for part in ("architecture", "dataset")
    )
    shown = f"step {best['step']}, epoch {best['epoch']}  {line_of(best['metrics'])}"
    lines = [
        f"{found['path']}: a checkpoint of {found['format']}, {_size(found['bytes'])}",
        f"step {found['step']}: {line_of(found['metrics']) or 'not tested at this step'}",
        f"best so far: {shown if best['metrics'] else 'nothing tested'}",
        f"architecture: {architecture}",
        *(f"{name}: {note}" for name, note in found["notes"].items()),
        f"dataset: {dataset}",
        f"optimizers: {', '.join(found['optimizers']) or 'none'}",
    ]
    lines += ["", f"{'':<24} {'shape':>16}  {'size':>10}  norms of rows: least, mean, most"]
    for index, table in enumerate(found["tables"]):
        state = "".join(f"  {name} {_size(size)}" for name, size in table["state"].items())
        lines.append(_line(f"table {index}", [table["rows"], table["dim"]], table) + state)
    lines += [_line(name, tensor["shape"], tensor) for name, tensor in found["dense"].items()]
    weights = [*found["tables"], *found["dense"].values()]
    if all("num_nan" in one for one in weights):
        wrong = sum(one["num_nan"] + one["num_inf"] for one in weights)
        lines += ["", f"values that are NaN or infinite: {wrong or 'none'}"]
    return lines


def _line(name: str, shape: list[int], found: Mapping[str, Any]) -> str:
    size = _size(4 * math.prod(shape))
    line = f"{name:<24} {' x '.join(f'{n:,}' for n in shape):>16}  {size:>10}"
    if "norm_min" in found:
        line += "  " + ", ".join(f"{found[f'norm_{k}']:.4g}" for k in ("min", "mean", "max"))
        if found["num_nan"] or found["num_inf"]:
            line += f"  {found['num_nan']} NaN, {found['num_inf']} infinite"
    return line


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"


if __name__ == "__main__":
    sys.exit(main())
