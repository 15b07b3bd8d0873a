"""A run: a task with its settings, opened alike on all ranks."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlrm.distributed import World, choose_device
from dlrm.files import check_all_local
from dlrm.flags import Values
from dlrm.remote.cache import values_with_uris
from dlrm.train.checkpoints.checkpoint import read_config
from dlrm.train.checkpoints.directory import last_checkpoint
from dlrm.version import __version__

USER_ERRORS = (ValueError, OSError, FloatingPointError)
CONTINUES = "continues"  # in a configuration: facts of the checkpoint that the run continues
_DATA_PATHS = ("dataset", "test_dataset", "synthetic_dataset_dir")


@dataclass(kw_only=True)
class Run:
    """The inputs of all modes of a command.

    Attributes:
        values: the settings, with a checkpoint's architecture and other replaced defaults.
        trains: whether the mode is a training.
        checkpoint: checkpoint of `--load_checkpoint_path`, or None.
        dataset: facts of the dataset that must be equal on all ranks, and in a resumed run.
        may_change: settings that a resumed run may change.
        transform: folder of the dataset's fitted transform, which is saved in checkpoints, or None.
        continued: facts of the checkpoint that the run continues, as stored in its own; None if it
            continues none.
    """

    values: Values
    world: World
    task: Any
    trains: bool
    checkpoint: Path | None
    dataset: dict[str, Any]
    may_change: frozenset[str] = field(default_factory=frozenset)
    transform: Path | None = None
    continued: dict[str, Any] | None = None

    def recorded(self) -> dict[str, Any]:
        """Returns the configuration of the run, as stored in its checkpoints.

        Paths of data are absolute, so that they are valid in any directory, or URIs.

        Raises:
            ValueError: the current folder's path is not in UTF-8.
        """
        flags = dict(self.values)
        flags |= {name: os.path.abspath(flags[name]) for name in _DATA_PATHS if flags.get(name)}
        check_all_local((f"--{name}", flags.get(name)) for name in _DATA_PATHS)
        return {
            "dlrm_version": __version__,
            "flags": values_with_uris(flags),
            "dataset": self.dataset,
            **({CONTINUES: self.continued} if self.continued else {}),
        }

    def frozen(self, run: dict[str, Any]) -> dict[str, Any]:
        """Returns the settings that a resumed run must keep, by name.

        Args:
            run: the configuration in a checkpoint.
        """
        # A flag newer than the run must have its default, which is what the run used.
        newer = {k: v for k, v in self.values.items() if k not in self.values.given}
        run = json.loads(json.dumps({**run, "flags": {**newer, **run["flags"]}}))
        kept = {f"--{k}": v for k, v in run["flags"].items() if k not in self.may_change}
        kept["--base_device"] = choose_device(kept["--base_device"])
        if continued := run.get(CONTINUES):
            digest = str(continued["manifest"])[:12]
            kept["--continue_from"] = f"step {continued['step']} (manifest {digest})"
        return kept | {f"dataset's {k}": v for k, v in run["dataset"].items()}


def known_checkpoint(values: Values, checkpoint: Path | None) -> Path | None:
    """Returns the last checkpoint of a resumed run, otherwise `checkpoint`."""
    path = values["save_checkpoint_path"]
    return (last_checkpoint(path) if values["resume"] and path else None) or checkpoint


def with_saved_flags(values: Values, checkpoint: Path | None, names: Iterable[str]) -> Values:
    """Takes flags that were not given from a checkpoint, if there is one."""
    if checkpoint is None:
        return values
    return values.filled(saved_flags(checkpoint, names))


def saved_flags(checkpoint: Path, names: Iterable[str]) -> dict[str, Any]:
    """Returns some of the flags that a checkpoint was saved with."""
    saved = read_config(checkpoint)["flags"]
    found = {name: saved[name] for name in names if name in saved}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}
