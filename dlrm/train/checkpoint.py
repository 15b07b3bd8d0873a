"""Checkpoints: directories that appear whole, hold raw tables, and are loaded without pickle.

    STEP/config.json            flags, data set and tables of the run that wrote it
    STEP/progress.json          step, best result so far, history: the trainer's own state
    STEP/dense.safetensors      parameters that are no table
    STEP/optimizer.safetensors  state of the optimizers but for that of table rows
    STEP/average.safetensors    average of the weights over the steps, if there is one
    STEP/rng.safetensors        state of torch's random generators; rng.<r> has that of rank r
    STEP/tables/<i>.bin         rows of table i, float32, row-major: mappable
    STEP/tables/<i>.<state>.bin the same of an optimizer's state of these rows
    STEP/transform/             what the training data were transformed by, if they came with it
    STEP/manifest.json          size and CRC-32 of each file, written last

Tables are stored one by one whatever the layout in memory and whichever rank holds them, so any
layout and any number of ranks read any other's.
"""

import fcntl
import json
import os
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from dlrm.distributed import World, agreed, from_first, gather
from dlrm.files import MANIFEST, read_manifest, write_atomically
from dlrm.ops import split_float32
from dlrm.train.checkpoint_writer import CheckpointWriter
from dlrm.train.parameters import INTEGER, Parameters, random_state_file

__all__ = [
    "CheckpointDirectory",
    "Parameters",
    "best_checkpoint",
    "check_unchanged",
    "find_checkpoint",
    "last_checkpoint",
    "load_checkpoint",
    "read_config",
    "save_checkpoint",
]

AVERAGE = "average.safetensors"
_BEST = "best.json"
_ROWS_AT_ONCE = 1 << 16  # of a table that is converted on its way


def save_checkpoint(
    directory: str | os.PathLike,
    parameters: Parameters,
    config: dict[str, Any],
    progress: dict[str, Any],
    attached: Path | None = None,
    world: World = World(),
) -> None:
    """Writes a checkpoint; arguments and errors are those of `CheckpointWriter`."""
    CheckpointWriter(directory, parameters, config, progress, attached, world).finish()


def read_config(directory: str | os.PathLike) -> dict[str, Any]:
    """Returns the `config` a checkpoint was saved with, and its `tables`.

    Raises:
        FileNotFoundError, ValueError: it is no whole checkpoint; the file is named.
    """
    read_manifest(Path(directory), "checkpoint")
    return json.loads(Path(directory, "config.json").read_text(encoding="utf-8"))


def load_checkpoint(
    directory: str | os.PathLike,
    parameters: Parameters,
    resume: bool = False,
    world: World = World(),
) -> dict[str, Any]:
    """Reads a checkpoint into a model and, to resume, into its optimizers and torch's generators.

    Nothing is changed before everything has been found to fit, on all ranks.

    Args:
        directory: the checkpoint.
        parameters: what to load into; each rank reads its own tables.
        resume: also load optimizer and generator state.
        world: the ranks; as many as saved it, or not.

    Returns:
        The `progress` it was saved with.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, or the architecture is another; all differences are named.
    """
    directory = Path(directory)
    own = {table for table, *_ in parameters.table_rows()}
    num_tables = sum(gather(len(own), world))
    with agreed(world, ValueError, OSError):
        read_manifest(directory, "checkpoint", True, lambda name: _is_read(name, own))
        config = read_config(directory)
        dense = load_file(directory / "dense.safetensors")
        _check_architecture(directory, parameters, dense, config["tables"], num_tables)
        kinds = [type(optimizer).__name__ for optimizer in parameters.optimizers]
        known = config["optimizers"]
        if resume and (kinds != known if own or world.size == 1 else set(kinds) - set(known)):
            raise ValueError(f"{directory}: of the optimizers {known}, here {kinds}")
    with torch.no_grad():
        for name, tensor in parameters.dense().items():
            tensor.copy_(dense[name])
        low = parameters.low()
        for table, weight, begin, end in parameters.table_rows():
            rest = low[id(weight)][begin:end] if id(weight) in low else None
            _read_rows(directory / "tables" / f"{table}.bin", weight[begin:end], rest)
        _load_average(directory, parameters)
        if resume:
            _load_optimizers(directory, parameters, config["tables"])
            _load_random_state(directory, world)
    return json.loads((directory / "progress.json").read_text(encoding="utf-8"))


def _is_read(name: str, own_tables: set[int]) -> bool:
    """Whether this rank reads a file of a checkpoint."""
    folder, _, file = name.rpartition("/")
    return folder != "tables" or int(file.partition(".")[0]) in own_tables


def check_unchanged(
    directory: str | os.PathLike, saved: dict[str, Any], current: dict[str, Any]
) -> None:
    """Raises ValueError naming every entry that differs between two flat maps."""
    missing = object()
    different = [
        f"{name}: {saved.get(name)!r} in the checkpoint, now {current.get(name)!r}"
        for name in sorted(saved.keys() | current.keys())
        if saved.get(name, missing) != current.get(name, missing)
    ]
    if different:
        raise ValueError(
            f"{directory}: cannot resume with other values, since the run would not go on as it "
            "began:\n  " + "\n  ".join(different)
        )


class CheckpointDirectory:
    """The checkpoints of one run: the last few, and the best.

    Each is a directory `step-<step>`; `best.json` names the best one. All ranks make one, of the
    same directory, and call the same methods in the same order.

    Args:
        path: the directory that holds them; created.
        keep: how many of the last to keep besides the best.
        attached: a directory to keep in each, see `CheckpointWriter`.
        world: the ranks.
        in_background: write while the training goes on.
        beat: called while files are waited for that get on.

    Raises:
        OSError: the directory cannot be written, or not all ranks see the same.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        keep: int = 1,
        attached: Path | None = None,
        world: World = World(),
        in_background: bool = False,
        beat: Callable[[], object] = lambda: None,
    ):
        self._beat = beat
        self.release: Callable[[], object] = lambda: None
        self.path, self.keep, self.attached = Path(path).absolute(), keep, attached
        self.world, self._in_background = world, in_background
        self._writer: CheckpointWriter | None = None
        self._new_best: dict[str, float] | None = None
        probe = self.path / f".writable-{os.getpid()}"
        with agreed(world, OSError):
            if world.rank == 0:
                self.path.mkdir(parents=True, exist_ok=True)
                probe.touch()
        name = from_first(probe.name, world)
        with agreed(world, OSError):
            if not (self.path / name).exists():
                raise OSError(f"{self.path}: is not the same directory as on rank 0")
        if world.rank == 0:
            probe.unlink()

    def claim(self) -> None:
        """Keeps other runs out until `release`, and removes what a killed one left behind.

        Raises:
            BlockingIOError: another run uses the directory.
        """
        with agreed(self.world, OSError):
            if self.world.rank == 0:
                lock = os.open(self.path, os.O_RDONLY)
                self.release = weakref.finalize(self, os.close, lock)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self.release()
                    raise BlockingIOError(f"{self.path}: another run saves here") from None
                except OSError:  # a file system without locks
                    pass
                for leftover in self.path.glob(".step-*.partial-*"):
                    shutil.rmtree(leftover, ignore_errors=True)

    def save(
        self, step: int, parameters: Parameters, config: dict[str, Any], progress: dict[str, Any]
    ) -> None:
        """Saves (see `CheckpointWriter`) unless it is saved; drops what is too old.

        In the background this returns as soon as what is saved is copied in memory.
        """
        self.finish()
        target = self._of(step)
        if not from_first((target / MANIFEST).exists(), self.world):
            self._writer = CheckpointWriter(
                target,
                parameters,
                config,
                progress,
                self.attached,
                self.world,
                self._in_background,
                self._beat,
            )
        if not self._in_background:
            self.finish()

    def written(self) -> bool:
        """Whether a save goes on of which this rank has written its part."""
        return self._writer is not None and self._writer.written()

    def finish(self) -> None:
        """Waits for a save that goes on, if one does, and lets the checkpoint appear.

        Raises:
            OSError: a rank could not write; nothing appears.
        """
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.finish()
        if self.world.rank == 0:
            if self._new_best is not None:
                write_atomically(self.path / _BEST, json.dumps(self._new_best) + "\n")
            self._prune()
        self._new_best = None

    def mark_best(self, record: dict[str, float]) -> None:
        """Notes which checkpoint is the best: its "step", and what was measured of it."""
        self._new_best = record
        if self._writer is None:
            self.finish()

    def last(self) -> Path | None:
        """The newest checkpoint, or None."""
        return from_first(last_checkpoint(self.path), self.world)

    def best(self) -> Path | None:
        """The best checkpoint, or None where none was marked."""
        with agreed(self.world, ValueError):
            found = best_checkpoint(self.path) if self.world.rank == 0 else None
        return from_first(found, self.world)

    def best_record(self) -> dict[str, float]:
        """What `mark_best` noted, or nothing."""
        with agreed(self.world, ValueError):
            record = _best_record(self.path) if self.world.rank == 0 else {}
        return from_first(record, self.world)

    def _of(self, step: int) -> Path:
        return self.path / f"step-{step:09d}"

    def _prune(self) -> None:
        best = best_checkpoint(self.path)
        for old in _whole_checkpoints(self.path)[: -self.keep]:
            if old != best:
                shutil.rmtree(old)


def last_checkpoint(path: str | os.PathLike) -> Path | None:
    """Returns the newest checkpoint in a run's directory, or None; nothing is changed."""
    found = _whole_checkpoints(Path(path))
    return found[-1] if found else None


def best_checkpoint(path: str | os.PathLike) -> Path | None:
    """Returns the best checkpoint in a run's directory, or None where none was marked.

    Raises:
        ValueError: `best.json` is damaged, or the checkpoint it names is gone.
    """
    record = _best_record(Path(path))
    if not record:
        return None
    best = Path(path).absolute() / f"step-{int(record['step']):09d}"
    if not (best / MANIFEST).exists():
        raise ValueError(f"{Path(path) / _BEST}: names {best}, which is not there")
    return best


def _best_record(path: Path) -> dict[str, float]:
    file = path / _BEST
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        int(record["step"])
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: expected the best step, got {error!r}") from error
    return record


def _whole_checkpoints(path: Path) -> list[Path]:
    """The checkpoints in a run's directory that are whole, by step."""
    return sorted(found.parent for found in path.absolute().glob(f"step-[0-9]*/{MANIFEST}"))


def find_checkpoint(path: str | os.PathLike) -> Path:
    """Returns the checkpoint at `path`, or the best or else the last one of a run's directory.

    Raises:
        FileNotFoundError: there is none.
    """
    path = Path(path)
    if (path / MANIFEST).exists():
        return path
    found = best_checkpoint(path) or last_checkpoint(path)
    if found is None:
        raise FileNotFoundError(f"{path}: no checkpoint here (expected {MANIFEST} or step-*/)")
    return found


def _check_architecture(
    directory: Path,
    parameters: Parameters,
    dense: dict[str, Tensor],
    tables: list[dict],
    num_tables: int,
) -> None:
    expected: dict[str, Any] = {"tables": num_tables}
    expected |= {name: list(tensor.shape) for name, tensor in parameters.dense().items()}
    found: dict[str, Any] = {"tables": len(tables)}
    found |= {name: list(tensor.shape) for name, tensor in dense.items()}
    for table, weight, begin, end in parameters.table_rows():
        expected[f"table {table}"] = [end - begin, weight.shape[1]]
        if table < len(tables):
            found[f"table {table}"] = [tables[table]["rows"], tables[table]["dim"]]
    _check_same(directory, "another architecture", found, expected)


def _check_same(directory: Path, what: str, found: dict, expected: dict) -> None:
    different = [
        f"{name}: {found.get(name, 'none')} in the checkpoint, {expected.get(name, 'none')} here"
        for name in {**expected, **found}
        if found.get(name) != expected.get(name)
    ]
    if different:
        more = f"\n  and {len(different) - 8} more" if len(different) > 8 else ""
        raise ValueError(f"{directory}: of {what}:\n  " + "\n  ".join(different[:8]) + more)


def _load_optimizers(directory: Path, parameters: Parameters, tables: list[dict]) -> None:
    """Gives the optimizers the saved state; torch's create theirs at the first step only."""
    weights = dict(parameters.model.named_parameters())
    optimizers = {id(parameter): optimizer for parameter, optimizer in parameters.optimizer_of()}
    for name, value in load_file(directory / "optimizer.safetensors").items():
        parameter, _, key = name.rpartition("/")
        weight = weights[parameter]
        state = optimizers[id(weight)].state[weight]
        if key.endswith(INTEGER):
            state[key.removesuffix(INTEGER)] = int(value)
        else:
            state[key] = value.to(weight.device)
            if value.shape == weight.shape:  # torch's fused optimizers want the weight's strides
                state[key] = torch.empty_like(weight, dtype=value.dtype).copy_(value)
    for table, weight, begin, end in parameters.table_rows():
        for key in tables[table]["state"]:
            state = optimizers[id(weight)].state[weight]
            if key not in state:  # torch's own optimizers have one of the weight's shape
                state[key] = torch.zeros_like(weight, dtype=torch.float32, requires_grad=False)
            _read_rows(directory / "tables" / f"{table}.{key}.bin", state[key][begin:end])
        for key, number in tables[table].get("scalars", {}).items():
            state = optimizers[id(weight)].state[weight]
            if isinstance(state.get(key), Tensor):
                state[key].fill_(number)
            else:
                state[key] = number if isinstance(number, int) else torch.tensor(number)


def _load_average(directory: Path, parameters: Parameters) -> None:
    """Loads the average of the weights; it begins at the weights where none was saved."""
    if parameters.average:
        saved = directory / AVERAGE
        average = load_file(saved if saved.exists() else directory / "dense.safetensors")
        for name, tensor in parameters.average.items():
            tensor.copy_(average[name])


def _load_random_state(directory: Path, world: World) -> None:
    """Sets torch's generators; a rank that no state was saved for keeps what its seed gave it."""
    file = directory / random_state_file(world.rank)
    if not file.is_file():
        return
    state = load_file(file)
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _read_rows(path: Path, rows: Tensor, low: Tensor | None = None) -> None:
    """Reads what `_write_rows` wrote, whether with `low` or without."""
    if not rows.numel():
        return
    saved = torch.from_numpy(np.memmap(path, dtype=np.float32, mode="c", shape=tuple(rows.shape)))
    if low is None:
        rows.copy_(saved)
        return
    for begin in range(0, len(rows), _ROWS_AT_ONCE):
        part = slice(begin, begin + _ROWS_AT_ONCE)
        high, rest = split_float32(saved[part])
        rows[part].copy_(high)
        low[part].copy_(rest)
