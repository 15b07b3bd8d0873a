"""The model card: a description of a checkpoint for people who are about to load it."""

import math
import platform
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dlrm.train.reports.roles import SELECTION, Roles

MODEL_CARD = "MODEL.md"
_LISTED = 8  # values of a list; of a longer one, the number and the range


def model_card(config: Mapping[str, Any], progress: Mapping[str, Any], has_transform: bool) -> str:
    """Returns Markdown: data, splits, metrics, flags, versions, and how to load the model.

    Args:
        config: configuration of the run, as a checkpoint stores it.
        progress: its progress, likewise.
        has_transform: whether the checkpoint has the fitted transform of its data.
    """
    is_dlrm = bool(config.get("tables"))
    kind = "A DLRM: the probability of a click" if is_dlrm else "A network"
    flags = {name: value for name, value in config.get("flags", {}).items() if value is not None}
    sections = {
        "Data": _data_lines(flags, config),
        "Metrics": _metric_lines(progress, Roles.from_config(config)),
        "Loading": _loading_lines(is_dlrm, has_transform),
        "Versions that wrote it": [
            f"* Python {platform.python_version()}",
            f"* torch {torch.__version__}",
            f"* numpy {np.__version__}",
        ],
        "Flags": ["```", *(f"--{name}={_shown(value)}" for name, value in flags.items()), "```"],
    }
    lines = [
        f"# Model card: step {progress.get('step', 'unknown')}",
        "",
        f"{kind}, trained with dlrm {config.get('dlrm_version', 'of an unknown version')}.",
    ]
    for title, body in sections.items():
        lines += ["", f"## {title}", "", *(body or ["Nothing is recorded."])]
    return "\n".join(lines) + "\n"


def _data_lines(flags: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    source = flags.get("dataset") or flags.get("data_dir") or flags.get("dataset_type")
    lines = [f"* source: `{source}`"] if source else []
    if source == "split":  # only `dlrm.fit` has such data without a directory
        lines = ["* source: a table in memory"]
    data = dict(config.get("dataset", {}))
    if splits := config.get("splits"):
        lines.append("* rows: " + ", ".join(f"{name} {n:,}" for name, n in splits.items()))
        data.pop("rows", None)  # of training, already listed
    for name, value in data.items():
        if isinstance(value, list) and len(value) > _LISTED:
            is_numbers = all(isinstance(one, int | float) for one in value)
            span = f", of {min(value):,} to {max(value):,}" if is_numbers else ""
            value = f"{len(value)}{span}"
        lines.append(f"* {name}: {value}")
    return lines


def _metric_lines(progress: Mapping[str, Any], roles: Roles | None) -> list[str]:
    lines = []
    if best := dict(progress.get("best") or {}):
        step, epoch = int(best.pop("step", 0)), best.pop("epoch", None)
        rows = roles.chooses if roles else "test"
        of_epoch = f" (epoch {epoch:.4g})" if epoch else ""
        lines += [f"Best {rows}, {SELECTION}, after step {step}{of_epoch}:", ""]
        lines += ["| metric | value |", "|---|---|"]
        for name, value in best.items():
            shown = "undefined" if math.isnan(value) else f"{value:.6f}"
            lines.append(f"| {name} | {shown} |")
        if roles:
            lines += ["", f"Selection rows, which chose the best weights: {rows}."]
            lines.append(f"Hold-out rows, which judge them: {roles.reports or 'none'}.")
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
    lines += [
        *("```", "", "```"),
        "dlrm predict --checkpoint THIS_DIRECTORY \\",
        "    --input ROWS --output scores.npy",
        "dlrm evaluate --checkpoint THIS_DIRECTORY --dataset DATASET",
        "```",
    ]
    if not has_transform:
        lines += ["", "The checkpoint has no fitted transform: name the dataset with `--dataset`."]
    return lines


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
