"""Checkpoints: directories that appear whole, hold raw tables, and are loaded without pickle.

    STEP/config.json            flags, data set and tables of the run that wrote it
    STEP/progress.json          step, best result so far, history: the trainer's own state
    STEP/dense.safetensors      parameters that are no table
    STEP/optimizer.safetensors  state of the optimizers but for that of table rows
    STEP/average.safetensors    average of the weights over the steps, if there is one
    STEP/rng.safetensors        state of torch's random generators
    STEP/tables/<i>.bin         rows of table i, float32, row-major: mappable
    STEP/tables/<i>.<state>.bin the same of an optimizer's state of these rows
    STEP/transform/             what the training data were transformed by, if they came with it
    STEP/manifest.json          size and CRC-32 of each file, written last

Tables are stored one by one whatever the layout in memory, so any layout reads any other's.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from dlrm.files import MANIFEST, read_manifest, staged_directory, write_atomically, write_manifest
from dlrm.ops import join_float32, split_float32

AVERAGE = "average.safetensors"
_BEST = "best.json"
_LOW = "_low"  # ends the name of a buffer of lower halves
_ROWS_AT_ONCE = 1 << 16  # of a table that is converted on its way
_INTEGER = ":int"  # marks state that is a Python integer, not a tensor


@dataclass(frozen=True)
class Parameters:
    """What a checkpoint holds of a model and its optimizers.

    Attributes:
        model: the network.
        tables: parameters that hold embedding tables, with the tables they hold: number -> rows,
            in order. Among several processes these are this one's. The lower halves of a bfloat16
            one are the model's buffer of its name and "_low".
        optimizers: those that update the model.
        average: of the weights, name -> tensor; saved and, when a run goes on, loaded.
    """

    model: nn.Module
    tables: Sequence[tuple[nn.Parameter, Mapping[int, int]]] = ()
    optimizers: Sequence[Optimizer] = ()
    average: Mapping[str, Tensor] = field(default_factory=dict)

    def dense(self) -> dict[str, Tensor]:
        """Name -> tensor of everything in the model's state but tables."""
        tables = {id(parameter) for parameter, _ in self.tables}
        names = {name for name, value in self.model.named_parameters() if id(value) in tables}
        names |= {name + _LOW for name in names}
        return {n: v for n, v in self.model.state_dict().items() if n not in names}

    def low(self) -> dict[int, Tensor]:
        """`id` of a parameter -> its values' lower halves, where it is bfloat16."""
        buffers = dict(self.model.named_buffers())
        names = ((name, id(parameter)) for name, parameter in self.model.named_parameters())
        return {key: buffers[name + _LOW] for name, key in names if name + _LOW in buffers}

    def table_rows(self) -> Iterator[tuple[int, nn.Parameter, int, int]]:
        """Yields (table, parameter that holds it, first row, end row) in table order."""
        for parameter, tables in self.tables:
            begin = 0
            for number, size in tables.items():
                yield number, parameter, begin, begin + size
                begin += size

    def optimizer_of(self) -> Iterator[tuple[nn.Parameter, Optimizer]]:
        """Yields every parameter that an optimizer updates, with that optimizer."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield parameter, optimizer


def save_checkpoint(
    directory: str | os.PathLike,
    parameters: Parameters,
    config: dict[str, Any],
    progress: dict[str, Any],
    attached: Path | None = None,
) -> None:
    """Writes a checkpoint; `directory` appears when it is whole, or not at all.

    Args:
        directory: must not exist, or be empty.
        parameters: what to save.
        config: how the run was configured, JSON values.
        progress: where the run stands, JSON values.
        attached: a directory to keep in the checkpoint under its name; its files are hard links
            where the file system allows it, else copies.

    Raises:
        OSError: it cannot be written.
    """
    with staged_directory(directory) as staging:
        tables = staging / "tables"
        tables.mkdir()
        row_state, other_state = _optimizer_state(parameters)
        low = parameters.low()
        listed = []
        for index, weight, begin, end in parameters.table_rows():
            state = row_state.get(id(weight), {})
            rest = low[id(weight)][begin:end] if id(weight) in low else None
            _write_rows(tables / f"{index}.bin", weight[begin:end], rest)
            for name, value in state.items():
                _write_rows(tables / f"{index}.{name}.bin", value[begin:end])
            listed.append({"rows": end - begin, "dim": weight.shape[1], "state": list(state)})
        save_file(_contiguous(parameters.dense()), staging / "dense.safetensors")
        save_file(_contiguous(other_state), staging / "optimizer.safetensors")
        if parameters.average:
            save_file(_contiguous(parameters.average), staging / AVERAGE)
        save_file(_random_state(), staging / "rng.safetensors")
        kinds = [type(optimizer).__name__ for optimizer in parameters.optimizers]
        _write_json(staging / "config.json", {**config, "optimizers": kinds, "tables": listed})
        _write_json(staging / "progress.json", progress)
        if attached:
            shutil.copytree(attached, staging / attached.name, copy_function=_link_or_copy)
        write_manifest(staging, "checkpoint")


def read_config(directory: str | os.PathLike) -> dict[str, Any]:
    """Returns the `config` a checkpoint was saved with, and its `tables`.

    Raises:
        FileNotFoundError, ValueError: it is no whole checkpoint; the file is named.
    """
    read_manifest(Path(directory), "checkpoint")
    return json.loads(Path(directory, "config.json").read_text(encoding="utf-8"))


def load_checkpoint(
    directory: str | os.PathLike, parameters: Parameters, resume: bool = False
) -> dict[str, Any]:
    """Reads a checkpoint into a model and, to resume, into its optimizers and torch's generators.

    Nothing is changed before everything has been found to fit.

    Args:
        directory: the checkpoint.
        parameters: what to load into.
        resume: also load optimizer and generator state.

    Returns:
        The `progress` it was saved with.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, or the architecture is another; all differences are named.
    """
    directory = Path(directory)
    read_manifest(directory, "checkpoint", check_crc=True)
    config = read_config(directory)
    dense = load_file(directory / "dense.safetensors")
    _check_architecture(directory, parameters, dense, config["tables"])
    kinds = [type(optimizer).__name__ for optimizer in parameters.optimizers]
    if resume and config["optimizers"] != kinds:
        raise ValueError(f"{directory}: of the optimizers {config['optimizers']}, here {kinds}")
    with torch.no_grad():
        for name, tensor in parameters.dense().items():
            tensor.copy_(dense[name])
        low = parameters.low()
        for index, weight, begin, end in parameters.table_rows():
            rest = low[id(weight)][begin:end] if id(weight) in low else None
            _read_rows(directory / "tables" / f"{index}.bin", weight[begin:end], rest)
        if resume:
            _load_optimizers(directory, parameters, config["tables"])
            if parameters.average:
                average = load_file(directory / AVERAGE)
                for name, tensor in parameters.average.items():
                    tensor.copy_(average[name])
            _set_random_state(load_file(directory / "rng.safetensors"))
    return json.loads((directory / "progress.json").read_text(encoding="utf-8"))


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

    Each is a directory `step-<step>`; `best.json` names the best one.

    Args:
        path: the directory that holds them; created.
        keep: how many of the last to keep besides the best.
        attached: a directory to keep in each, see `save_checkpoint`.

    Raises:
        OSError: the directory cannot be written.
    """

    def __init__(self, path: str | os.PathLike, keep: int = 1, attached: Path | None = None):
        self.path, self.keep, self.attached = Path(path).absolute(), keep, attached
        self.path.mkdir(parents=True, exist_ok=True)
        for leftover in self.path.glob(".step-*.partial-*"):  # of a run that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        probe = self.path / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()

    def save(
        self, step: int, parameters: Parameters, config: dict[str, Any], progress: dict[str, Any]
    ) -> Path:
        """Saves (see `save_checkpoint`) unless it is saved; drops what is too old."""
        target = self._of(step)
        if not (target / MANIFEST).exists():
            save_checkpoint(target, parameters, config, progress, self.attached)
        self._prune()
        return target

    def mark_best(self, record: dict[str, float]) -> None:
        """Notes which saved checkpoint is the best: its "step", and what was measured of it."""
        write_atomically(self.path / _BEST, json.dumps(record) + "\n")
        self._prune()

    def last(self) -> Path | None:
        """The newest checkpoint, or None."""
        return last_checkpoint(self.path)

    def best(self) -> Path | None:
        """The best checkpoint, or None where none was marked."""
        return best_checkpoint(self.path)

    def best_record(self) -> dict[str, float]:
        """What `mark_best` noted, or nothing."""
        return _best_record(self.path)

    def _of(self, step: int) -> Path:
        return self.path / f"step-{step:09d}"

    def _prune(self) -> None:
        best = self.best()
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
    directory: Path, parameters: Parameters, dense: dict[str, Tensor], tables: list[dict]
) -> None:
    expected = {name: list(tensor.shape) for name, tensor in parameters.dense().items()}
    found = {name: list(tensor.shape) for name, tensor in dense.items()}
    for index, weight, begin, end in parameters.table_rows():
        expected[f"table {index}"] = [end - begin, weight.shape[1]]
    for index, table in enumerate(tables):
        found[f"table {index}"] = [table["rows"], table["dim"]]
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


def _optimizer_state(
    parameters: Parameters,
) -> tuple[dict[int, dict[str, Tensor]], dict[str, Tensor]]:
    """Splits the optimizers' state in that with a row for every row of a table, and the rest.

    Returns:
        Parameter's `id` -> name -> tensor `[rows, ...]`, and "parameter/name" -> tensor.
    """
    names = {id(parameter): name for name, parameter in parameters.model.named_parameters()}
    tables = {id(parameter) for parameter, _ in parameters.tables}
    rows: dict[int, dict[str, Tensor]] = {}
    others = {}
    for weight, optimizer in parameters.optimizer_of():
        for key, value in optimizer.state.get(weight, {}).items():
            by_row = isinstance(value, Tensor) and value.shape[:1] == weight.shape[:1]
            if by_row and id(weight) in tables:
                rows.setdefault(id(weight), {})[key] = value
            elif isinstance(value, Tensor):
                others[f"{names[id(weight)]}/{key}"] = value
            elif isinstance(value, int):
                others[f"{names[id(weight)]}/{key}{_INTEGER}"] = torch.tensor(value)
    return rows, others


def _load_optimizers(directory: Path, parameters: Parameters, tables: list[dict]) -> None:
    """Gives the optimizers the saved state; torch's create theirs at the first step only."""
    weights = dict(parameters.model.named_parameters())
    optimizers = {id(parameter): optimizer for parameter, optimizer in parameters.optimizer_of()}
    for name, value in load_file(directory / "optimizer.safetensors").items():
        parameter, _, key = name.rpartition("/")
        weight = weights[parameter]
        state = optimizers[id(weight)].state[weight]
        if key.endswith(_INTEGER):
            state[key.removesuffix(_INTEGER)] = int(value)
        else:
            state[key] = value.to(weight.device)
    for index, weight, begin, end in parameters.table_rows():
        for key in tables[index]["state"]:
            state = optimizers[id(weight)].state[weight]
            if key not in state:  # torch's own optimizers have one of the weight's shape
                state[key] = torch.zeros_like(weight, dtype=torch.float32, requires_grad=False)
            _read_rows(directory / "tables" / f"{index}.{key}.bin", state[key][begin:end])


def _random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _write_rows(path: Path, rows: Tensor, low: Tensor | None = None) -> None:
    """Writes rows as float32; `low` has the lower halves of bfloat16 ones."""
    if low is None:
        assert rows.dtype == torch.float32, f"rows of {rows.dtype}"
        rows.detach().contiguous().cpu().numpy().tofile(path)
        return
    with open(path, "wb") as file:
        for high, rest in zip(rows.split(_ROWS_AT_ONCE), low.split(_ROWS_AT_ONCE), strict=True):
            join_float32(high, rest).cpu().numpy().tofile(file)


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


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
