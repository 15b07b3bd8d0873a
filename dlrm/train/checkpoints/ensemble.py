"""Checkpoints of ensembles: several checkpoints in one, for serving and not for training.

STEP/members/<i>/           the checkpoint of each member, as a run of its own would save it
STEP/config.json            that of the first member, with the number of members
STEP/progress.json          the best step of the members, and the metrics of the ensemble
STEP/transform/  MODEL.md  manifest.json
"""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dlrm.files import link_or_copy, staged_directory
from dlrm.locks import in_use
from dlrm.train.checkpoints.checkpoint import read_config
from dlrm.train.checkpoints.description import describe
from dlrm.train.checkpoints.saved_model import attached_to
from dlrm.train.checkpoints.state import MEMBERS


def member_checkpoints(path: Path) -> list[Path]:
    """Returns the checkpoints of an ensemble's members; an empty list if it is no ensemble."""
    return [path / MEMBERS / str(index) for index in range(read_config(path).get(MEMBERS, 0))]


def write_ensemble(
    members: Sequence[Path], directory: Path, step: int, metrics: Mapping[str, float]
) -> None:
    """Writes a checkpoint of checkpoints; files are hard links where possible.

    Args:
        members: checkpoints of one architecture and one dataset, whose logits are averaged.
        directory: appears once it is complete, and replaces an earlier checkpoint there.
        metrics: metrics of the ensemble on the test rows.

    Raises:
        OSError, ValueError: a member is missing or damaged, or nothing can be written.
    """
    with ExitStack() as held:
        for path in members:
            if not held.enter_context(in_use(path)):
                raise FileNotFoundError(f"{path}: the checkpoint is gone")
        config = {**read_config(members[0]), MEMBERS: len(members)}
        best = {**metrics, "step": step}
        progress: dict[str, Any] = {"step": step, "best": best, "history": []}
        with staged_directory(directory, replace="checkpoint") as staging:
            for index, path in enumerate(members):
                folder = staging / MEMBERS / str(index)
                shutil.copytree(path, folder, copy_function=link_or_copy)
            for folder in attached_to(members[0]):
                shutil.copytree(folder, staging / folder.name, copy_function=link_or_copy)
            describe(staging, config, progress)
