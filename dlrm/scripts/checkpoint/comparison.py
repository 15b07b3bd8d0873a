"""Differences of two checkpoints, as JSON values and as lines for people."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from dlrm.language import flags as bert_flags
from dlrm.model.config import ARCHITECTURE
from dlrm.scripts.checkpoint.description import open_any, progress_of, short_text
from dlrm.train.checkpoints.diff import difference, map_differences, shape_of, weights_of
from dlrm.train.checkpoints.saved_model import SavedModel
from dlrm.vision import flags as cnn_flags

# Flags of any network that determine the shapes of its weights.
_ARCHITECTURES = dict.fromkeys((*ARCHITECTURE, *cnn_flags.ARCHITECTURE, *bert_flags.ARCHITECTURE))
_SHOWN = 5  # number of tensors that diff shows for different networks
# Flags about locations, and about whether a run was resumed, that do not describe the model.
_PLACES = (
    *("save_checkpoint_path", "load_checkpoint_path", "log_path", "resume"),
    "table_files",
)


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
        leave_out = {"tables"} if same_format else {"tables", "optimizers"}
        mine, theirs = (_without_places(saved.config, leave_out) for saved in (one, other))
        config = list(map_differences(mine, theirs, common=not same_format))
        progress = list(map_differences(progress_of(one), progress_of(other)))
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


def lines_of_diff(found: dict[str, Any]) -> list[str]:
    """Returns the results of `compare` as lines."""
    lines = [f"a: {found['a']}", f"b: {found['b']}"]
    if found["architecture"]:
        flags_of = found["architecture"].items()
        apart = "; ".join(
            f"--{name} {short_text(a)} and {short_text(b)}" for name, (a, b) in flags_of
        )
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
