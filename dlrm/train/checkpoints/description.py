"""The files that describe a checkpoint, and its manifest."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlrm.documents import json_text, read_json, with_nan
from dlrm.manifest import write_manifest
from dlrm.train.reports.model_card import MODEL_CARD, model_card

CONFIG, PROGRESS = "config.json", "progress.json"


def describe(
    directory: Path,
    config: Mapping[str, Any],
    progress: Mapping[str, Any],
    checksums: Mapping[str, str] | None = None,
) -> None:
    """Writes configuration, progress, model card and manifest, after a checkpoint's other files.

    Args:
        directory: staging directory of the checkpoint, without hard links under these names.
        checksums: known sums of other files, see `write_manifest`.
    """
    for name, value in ((CONFIG, config), (PROGRESS, progress)):
        (directory / name).write_text(json_text(value, indent=2) + "\n", encoding="utf-8")
    card = model_card(config, progress, (directory / "transform").is_dir())
    (directory / MODEL_CARD).write_text(card, encoding="utf-8")
    write_manifest(directory, "checkpoint", checksums)


def described_progress(directory: Path) -> dict[str, Any]:
    """Returns the `progress` that `describe` wrote, with NaN for metrics without a value."""
    return with_nan(read_json(directory / PROGRESS))
