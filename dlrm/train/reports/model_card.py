"""The model card: a description of a checkpoint for people who are about to load it."""

import math
import platform
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dlrm.train.reports.roles import CHOSEN, NEVER_CHOSEN, Roles

MODEL_CARD = "MODEL.md"


def model_card(config: Mapping[str, Any], progress: Mapping[str, Any], has_transform: bool) -> str:
    """Returns Markdown: data, splits, metrics, flags, versions, and how to load the model.

    Args:
        config: configuration of the run, as a checkpoint stores it.
        has_transform: whether the checkpoint has the fitted transform of its data.
    """
    flags, data = config.get("flags", {}), config.get("dataset", {})
    is_dlrm = bool(config.get("tables"))
    kind = "A DLRM: the probability of a click" if is_dlrm else "A network"
    lines = [
        f"# Model card: step {progress.get('step', 'unknown')}",
        "",
        f"{kind}, trained with dlrm {config.get('dlrm_version', 'of an unknown version')}.",
        *_section("Data", _data_lines(flags, data, config)),
        *_section("Metrics", _metric_lines(progress, Roles.from_config(config))),
        *_section("Loading", _loading_lines(is_dlrm, has_transform)),
        *_section("Versions that wrote it", _version_lines()),
        *_section("Flags", _flag_lines(flags)),
    ]
    return "\n".join(lines) + "\n"


def _section(title: str, lines: list[str]) -> list[str]:
    return ["", f"## {title}", "", *(lines or ["Nothing is recorded."])]


def _data_lines(
    flags: Mapping[str, Any], data: Mapping[str, Any], config: Mapping[str, Any]
) -> list[str]:
    source = flags.get("dataset") or flags.get("data_dir") or flags.get("dataset_type")
    lines = [f"* source: `{source}`"] if source else []
    if source == "split":  # only `dlrm.fit` has such data without a directory
        lines = ["* source: a table in memory"]
    if splits := config.get("splits"):
        lines.append("* rows: " + ", ".join(f"{name} {n:,}" for name, n in splits.items()))
    for name, value in data.items():
        if name == "rows" and splits:  # the training rows, already listed
            continue
        if isinstance(value, list) and len(value) > 8:
            value = (
                f"{len(value)}, of {min(value):,} to {max(value):,}"
                if _numbers(value)
                else len(value)
            )
        lines.append(f"* {name}: {value}")
    return lines


def _numbers(values: list[Any]) -> bool:
    return all(isinstance(value, int | float) for value in values)


def _metric_lines(progress: Mapping[str, Any], roles: Roles | None) -> list[str]:
    """Returns lines about the best test so far, and the last training loss."""
    lines = []
    best = dict(progress.get("best") or {})
    if best:
        step = int(best.pop("step", 0))
        epoch = best.pop("epoch", None)
        rows = roles.chooses if roles else "test"
        lines.append(
            f"Best {rows}, {CHOSEN}, after step {step}"
            + (f" (epoch {epoch:.4g})" if epoch else "")
            + ":"
        )
        lines += ["", "| metric | value |", "|---|---|"]
        for name, value in best.items():
            shown = "undefined" if math.isnan(value) else f"{value:.6f}"
            lines.append(f"| {name} | {shown} |")
        if roles:
            reports = roles.reports
            never = f"The {reports} rows were {NEVER_CHOSEN}." if reports else "No rows report."
            lines += ["", f"The {rows} rows chose the best weights. {never}"]
    losses = [entry["loss"] for entry in progress.get("curve") or [] if "loss" in entry]
    if losses:
        lines += ["", f"Training loss, of the last steps: {losses[-1]:.6f}"]
    return lines


def _loading_lines(is_dlrm: bool, has_transform: bool) -> list[str]:
    if not is_dlrm:
        return ["Name this directory with `--load_checkpoint_path` to the command that trained it."]
    lines = ["```python", "import dlrm", "", 'model = dlrm.load("THIS_DIRECTORY")']
    if has_transform:
        lines.append("model.predict(rows)  # raw rows: the fitted transform is in the checkpoint")
    lines += ["```", "", "```", "dlrm predict --checkpoint THIS_DIRECTORY \\"]
    lines += ["    --input ROWS --output scores.npy"]
    lines += [
        "dlrm evaluate --checkpoint THIS_DIRECTORY --dataset DATASET",
        "```",
    ]
    if not has_transform:
        lines += ["", "The checkpoint has no fitted transform: name the dataset with `--dataset`."]
    return lines


def _version_lines() -> list[str]:
    versions = {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
    return [f"* {name} {version}" for name, version in versions.items()]


def _flag_lines(flags: Mapping[str, Any]) -> list[str]:
    known = {name: value for name, value in flags.items() if value is not None}
    return ["```", *(f"--{name}={_shown(value)}" for name, value in known.items()), "```"]


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
