"""The summary of a training beside its weights, as `dlrm.fit` and `model.results` have it."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dlrm.documents import json_text, read_json, with_nan
from dlrm.files import MANIFEST, write_atomically
from dlrm.manifest import read_manifest, write_manifest
from dlrm.train.checkpoints.directory import best_checkpoint
from dlrm.train.checkpoints.runs import read_run

RESULTS = "results.json"  # in a checkpoint


def write_results(checkpoint: Path, results: Mapping[str, Any]) -> None:
    """Adds the summary of a training to a checkpoint.

    Raises:
        OSError, ValueError: it cannot be written, or the checkpoint is damaged.
    """
    known = read_manifest(checkpoint, "checkpoint")["files"]
    write_atomically(checkpoint / RESULTS, json_text(dict(results), indent=1) + "\n")
    sums = {name: facts["crc32"] for name, facts in known.items() if name != RESULTS}
    write_manifest(checkpoint, "checkpoint", sums)


def read_results(checkpoint: Path) -> dict[str, Any]:
    """Returns the summary of a checkpoint's training, or what its progress and log say of it.

    The metrics of rows that were never chosen on are in the log of a command, which is read for the
    run's best checkpoint only. Without a readable checkpoint the result is empty.
    """
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        if RESULTS in read_json(checkpoint / MANIFEST)["files"]:
            return with_nan(read_json(checkpoint / RESULTS))
        run = read_run(checkpoint)
        is_best = best_checkpoint(checkpoint.parent) == checkpoint
        others = {n: v for n, v in run.metrics.items() if n not in run.tested and is_best}
        tested = {f"{run.roles.chooses}_{name}": run.metrics[name] for name in run.tested}
        return {**tested, **others, **run.roles.facts()}
    return {}
