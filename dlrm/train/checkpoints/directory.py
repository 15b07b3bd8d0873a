"""The checkpoints of a run: all of them, the newest and the best."""

import math
import os
import re
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from dlrm.distributed import World, agreed, from_first
from dlrm.documents import brief, read_json, with_nan
from dlrm.files import MANIFEST, check_local, make_directories, tidy_leftovers, write_atomically
from dlrm.locks import in_use, lock, new_suffix, remove_unused, sync
from dlrm.manifest import read_manifest, read_sealed, sealed_json
from dlrm.train.checkpoints.state import Parameters
from dlrm.train.checkpoints.writer import PROGRESS, CheckpointWriter

_BEST = "best.json"
_Found = TypeVar("_Found")


class CheckpointDirectory:
    """The checkpoints of one run: the last few, and the best.

    Each is a directory `step-<step>`, and `best.json` names the best one (see `best_record`). All
    ranks construct one for the same directory, which all see, and call the same methods in the same
    order.

    Attributes:
        saved: called on the first rank with the checkpoints that are kept, by step, when it is
            claimed and after each that is saved.
        inherited: returns further directories to copy into a checkpoint, when it is saved.

    Args:
        path: directory of the checkpoints; created.
        keep: number of last checkpoints to keep besides the best.
        attached: a directory to copy into each, see `CheckpointWriter`.
        in_background: write while the training continues.

    Raises:
        OSError: the directory cannot be written.
        ValueError: its path, or that of the current folder, is not in UTF-8; or a rank sees another
            directory than the first.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        keep: int = 1,
        attached: Path | None = None,
        world: World = World(),
        in_background: bool = False,
    ):
        self.release: Callable[[], object] = lambda: None
        self.saved: Callable[[list[Path]], object] = lambda steps: None
        self.inherited: Callable[[], Sequence[Path]] = lambda: ()
        self.path, self.keep, self.attached = Path(path).absolute(), keep, attached
        self.world, self._in_background = world, in_background
        self._writer: CheckpointWriter | None = None
        self._new_best: dict[str, float] | None = None
        check_local(self.path)
        _check_shared(self.path, world)

    def claim(self) -> None:
        """Keeps other runs out until `release`, and tidies up after a killed one.

        It removes unfinished writes and removals, and makes `best.json` name the best checkpoint.

        Raises:
            BlockingIOError: another run uses the directory.
            ValueError: the best checkpoint is missing, or the record that names it is damaged.
        """
        with agreed(self.world, OSError, ValueError):
            if self.world.rank == 0:
                held = ExitStack()
                held.enter_context(
                    lock(self.path / ".lock", f"{self.path}: another run saves here")
                )
                self.release = weakref.finalize(self, held.close)
                tidy_leftovers(self.path)
                best_checkpoint(self.path)  # so that a missing one is reported before the training
                if (record := best_record(self.path)) != _pointer(self.path):
                    _write_pointer(self.path, record)
                self.saved(self._kept())

    def save(
        self, step: int, parameters: Parameters, config: dict[str, Any], progress: dict[str, Any]
    ) -> None:
        """Saves (see `CheckpointWriter`) unless saved already, and prunes old checkpoints.

        In the background it returns as soon as the state is copied in memory.
        """
        self.finish()
        target = step_directory(self.path, step)
        if not from_first((target / MANIFEST).exists(), self.world):
            attached = [*([self.attached] if self.attached else []), *self.inherited()]
            described, background = (config, progress, attached), self._in_background
            self._writer = CheckpointWriter(target, parameters, *described, self.world, background)
        if not self._in_background:
            self.finish()

    def written(self) -> bool:
        """Returns whether a save is in progress of which this rank has written its part."""
        return self._writer is not None and self._writer.written()

    def finish(self) -> None:
        """Waits for a save in progress, if there is one, and publishes the checkpoint.

        Raises:
            OSError: a rank could not write; nothing is published, or only `best.json` is not.
            ValueError: `best.json`, or a checkpoint that is kept, is damaged.
        """
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.finish()
        with agreed(self.world, OSError, ValueError):
            if self.world.rank == 0:
                if self._new_best is not None:
                    _write_pointer(self.path, self._new_best)
                kept = self._kept()
                for old in all_checkpoints(self.path):
                    if old not in kept:
                        remove_unused(old)
                self.saved(kept)
        self._new_best = None

    def mark_best(self, record: dict[str, float]) -> None:
        """Records which checkpoint is the best: its "step" and its metrics."""
        self._new_best = record
        if self._writer is None:
            self.finish()

    def last(self) -> Path | None:
        """Returns the newest checkpoint, or None."""
        found = self._by_first(last_checkpoint)
        return found and self.path / found.name  # the first rank may mount it elsewhere

    def best(self) -> Path | None:
        """Returns the best checkpoint, or None if none was marked."""
        found = self._by_first(best_checkpoint)
        return found and self.path / found.name

    def best_record(self) -> dict[str, float]:
        """Returns the record of the best checkpoint; see `best_record`."""
        return self._by_first(best_record) or {}

    def _by_first(self, read: Callable[[Path], _Found]) -> _Found | None:
        with agreed(self.world, ValueError, OSError):
            found = read(self.path) if self.world.rank == 0 else None
        return from_first(found, self.world)

    def _kept(self) -> list[Path]:
        """Returns the checkpoints that are not to be pruned."""
        best, found = best_checkpoint(self.path), all_checkpoints(self.path)
        return [one for one in found if one == best or one in found[-self.keep :]]


def _check_shared(path: Path, world: World) -> None:
    """Creates a directory, and checks that all ranks see the first one's."""
    token = path / f".shared.partial-{new_suffix()}"
    with agreed(world, OSError):
        make_directories(path)
        if world.rank == 0:
            token.touch()
    name = from_first(token.name, world)
    try:
        with agreed(world, ValueError):
            if not (path / name).exists():
                raise ValueError(
                    f"{path}: expected the folder of rank 0, got another of this name; name one "
                    "that all hosts share by --save_checkpoint_path, or for a URI by --cache_dir"
                )
    finally:
        if world.rank == 0:
            token.unlink(missing_ok=True)


def run_directory(path: Path) -> Path:
    """Returns the directory of a run: that of its checkpoints, or the one above `checkpoints`."""
    path = path.absolute()
    return path.parent if path.name == "checkpoints" else path


def last_checkpoint(path: str | os.PathLike) -> Path | None:
    """Returns the newest checkpoint in a run's directory, or None; changes nothing."""
    found = all_checkpoints(path)
    return found[-1] if found else None


def best_checkpoint(path: str | os.PathLike) -> Path | None:
    """Returns the best checkpoint in a run's directory, or None if none was tested.

    Raises:
        ValueError: the record of the best is damaged, or the checkpoint that it names is gone.
    """
    record = best_record(path)
    while record:
        best = step_directory(Path(path).absolute(), record["step"])
        if (best / MANIFEST).exists():
            return best
        before, record = record, best_record(path)
        if record == before:  # otherwise it was pruned because there is a better one
            newest = last_checkpoint(path)
            raise ValueError(
                f"{path}: expected the best checkpoint, {best.name}, as {_BEST} or {newest} says, "
                f"got none; name a checkpoint instead, as {newest}"
            )
    return None


def best_record(path: str | os.PathLike) -> dict[str, float]:
    """Returns the metrics of the best checkpoint in a run's directory, and its "step".

    The progress of the newest checkpoint decides, since it appears together with its weights; a
    process may be killed before it updates `best.json`. A checkpoint that was saved before it was
    tested cannot record that it is the best; only then `best.json` decides.

    Returns:
        The metrics, "step" and "epoch"; nothing if no checkpoint was tested.

    Raises:
        ValueError: `best.json`, or the newest checkpoint, is damaged.
    """
    newest, pointer = last_checkpoint(path), _pointer(Path(path))
    if newest is None:
        return {}
    if pointer and step_directory(newest.parent, pointer["step"]) == newest:
        return pointer
    with in_use(newest) as stays:
        if not stays:
            return best_record(path)  # there is a newer one by now
        record = read_progress(newest).get("best", pointer)
    return _checked_record(newest / PROGRESS, record) if record else {}


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """Returns the `progress` of a checkpoint, with NaN for metrics without a value.

    Raises:
        FileNotFoundError, ValueError: it is not complete, or the file is damaged.
    """
    read_manifest(checkpoint, "checkpoint", True, lambda file: file == PROGRESS)
    return with_nan(read_json(checkpoint / PROGRESS))


def step_directory(path: Path, step: float) -> Path:
    """Returns the path of a step's checkpoint in a run's directory."""
    return path / f"step-{int(step):09d}"


def _pointer(path: Path) -> dict[str, float]:
    """Returns the record of `best.json`, or nothing if there is no such file."""
    file = path / _BEST
    if not file.exists():
        return {}
    record = with_nan(read_sealed(file, required=True))
    record.pop("own_crc32", None)
    return _checked_record(file, record)


def _write_pointer(path: Path, record: dict[str, float]) -> None:
    if record:
        write_atomically(path / _BEST, sealed_json(record))
    else:
        (path / _BEST).unlink()
        sync(path)


def _checked_record(file: Path, record: Any) -> dict[str, float]:
    """Returns the record of a tested step; raises ValueError for anything else."""
    numbers = isinstance(record, dict) and all(type(v) in (int, float) for v in record.values())
    if not numbers or not 0 <= record.get("step", math.nan) < math.inf:
        raise ValueError(f"{file}: expected the best step, got {brief(record)}: damaged")
    return record


def all_checkpoints(path: str | os.PathLike) -> list[Path]:
    """Returns the checkpoints in a run's directory, by step."""
    found = (manifest.parent for manifest in Path(path).absolute().glob(f"step-*/{MANIFEST}"))
    # Other directories, such as a user's copy, are neither taken for a step nor pruned.
    return sorted(one for one in found if re.fullmatch(r"step-[0-9]{9}", one.name))
