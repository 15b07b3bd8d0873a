"""Descriptions of checkpoints, as JSON values and as lines for people."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dlrm.files import MANIFEST
from dlrm.locks import in_use
from dlrm.metrics.table import line_of
from dlrm.model.config import ARCHITECTURE
from dlrm.tasks.run import CONTINUES
from dlrm.train.checkpoints.diff import statistics
from dlrm.train.checkpoints.directory import (
    all_checkpoints,
    best_checkpoint,
    best_record,
    find_checkpoint,
)
from dlrm.train.checkpoints.nvidia import is_nvidia, read_nvidia
from dlrm.train.checkpoints.saved_model import SavedModel, read_saved


def open_any(
    path: Path, feature_order: str | None = None, any_order: bool = False, check_crc: bool = False
) -> SavedModel:
    """Opens a checkpoint of ours or a directory of NVIDIA's.

    Args:
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


def describe_run(path: Path, check_crc: bool = False) -> dict[str, Any]:
    """Returns a description of a run's directory of checkpoints, as JSON values."""
    best = best_checkpoint(path)
    checkpoints = []
    for directory in all_checkpoints(path):
        with in_use(directory) as stays:
            if stays:
                saved = read_saved(directory, check_crc)
                progress = progress_of(saved)
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
        weights: read them, for their statistics.
        feature_order: see `read_nvidia`.
        check_crc: compare the CRC-32 of every file of ours.
    """
    saved = open_any(path, feature_order, any_order=True, check_crc=check_crc or weights)
    if check_crc and saved.format == "nvidia":
        raise ValueError(f"{path}: NVIDIA's directories have no CRC-32 to compare")
    saved_flags = saved.config.get("flags", {})
    dense = {name: tensor.float().numpy() for name, tensor in sorted(saved.dense.items())}
    first = dense.get("bottom_mlp.0.weight")
    return {
        "path": str(saved.path),
        "format": saved.format,
        "bytes": _bytes(saved.path),
        "crc_checked": check_crc,
        **progress_of(saved),
        "dlrm_version": saved.config.get("dlrm_version"),
        "architecture": {
            "num_numerical_features": None if first is None else first.shape[1],
            **{name: saved_flags[name] for name in ARCHITECTURE if name in saved_flags},
        },
        "notes": saved.notes,
        "dataset": {"path": saved_flags.get("dataset"), **saved.config.get("dataset", {})},
        "optimizers": saved.config.get("optimizers", []),
        "optimizer_values": sum(tensor.numel() for tensor in saved.optimizer.values()),
        "continues": saved.config.get(CONTINUES),
        "attached": [folder.name for folder in saved.attached],
        "tables": [_described_table(saved, index, weights) for index in range(len(saved.tables))],
        "dense": {
            name: {"shape": list(tensor.shape), **(asdict(statistics(tensor)) if weights else {})}
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


def progress_of(saved: SavedModel) -> dict[str, Any]:
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


def lines_of_run(found: dict[str, Any]) -> list[str]:
    """Returns the description of a run as lines."""
    checked = ", the CRC-32 of every file is right" if found["crc_checked"] else ""
    count = len(found["checkpoints"])
    lines = [f"{found['path']}: {count} checkpoint{'s' * (count > 1)}{checked}"]
    for checkpoint in found["checkpoints"]:
        mark = "  <- best" if checkpoint["best"] else ""
        lines.append(
            f"  {checkpoint['name']}  {_size(checkpoint['bytes'])}  "
            f"{line_of(checkpoint['metrics']) or 'not tested at this step'}{mark}"
        )
    return lines


def lines_of_checkpoint(found: dict[str, Any]) -> list[str]:
    """Returns the description of a checkpoint as lines."""
    best = found["best_so_far"]
    architecture = "  ".join(f"{k} {short_text(v)}" for k, v in found["architecture"].items())
    lines = [
        f"{found['path']}: a checkpoint of {found['format']}, {_size(found['bytes'])}"
        + (", the CRC-32 of every file is right" if found["crc_checked"] else ""),
        f"step {found['step']}: {line_of(found['metrics']) or 'not tested at this step'}",
        f"best so far: step {best['step']}, epoch {best['epoch']}  {line_of(best['metrics'])}"
        if best["metrics"]
        else "best so far: nothing tested",
        f"architecture: {architecture}",
        *(f"{name}: {note}" for name, note in found["notes"].items()),
        "dataset: " + "  ".join(f"{k} {short_text(v)}" for k, v in found["dataset"].items()),
        f"optimizers: {', '.join(found['optimizers']) or 'none'}",
    ]
    if continued := found["continues"]:
        run = Path(continued["run"], continued["checkpoint"])
        lines.append(f"continues from: {run}, step {continued['step']}")
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
        lines += ["", f"values that are NaN or infinite: {wrong or 'none'}"]
    return lines


def _line(name: str, shape: list[int], size: int, found: dict[str, Any]) -> str:
    shown = " x ".join(f"{n:,}" for n in shape)
    line = f"{name:<24} {shown:>16}  {_size(size):>10}"
    if "norm_min" in found:
        line += "  " + ", ".join(f"{found[f'norm_{k}']:.4g}" for k in ("min", "mean", "max"))
        if found["num_nan"] or found["num_inf"]:
            line += f"  {found['num_nan']} NaN, {found['num_inf']} infinite"
    return line


def short_text(value: Any) -> str:
    """Returns a value of a configuration, the entries of a list with commas between."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"
