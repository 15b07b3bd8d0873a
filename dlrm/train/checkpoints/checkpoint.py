"""Checkpoints: directories that appear whole, store raw tables, and load without pickle.

    STEP/config.json            flags, data set and tables of the run that wrote it
    STEP/progress.json          step, best result so far, history: the trainer's own state
    STEP/dense.safetensors      parameters other than tables
    STEP/optimizer.safetensors  state of the optimizers except that of table rows
    STEP/average.safetensors    EMA of the weights, if there is one
    STEP/rng.safetensors        state of torch's random generators; rng.<r> is that of rank r
    STEP/tables/<i>.bin         rows of table i, float32, row-major: mappable
    STEP/tables/<i>.<state>.bin optimizer state of these rows, in the same format
    STEP/transform/             the fitted transform of the training data, if they came with one
    STEP/MODEL.md               model card: describes the model and how to load it
    STEP/results.json           summary of the training, if `dlrm.fit` wrote it
    STEP/recalibration/         recalibration of the model's scores, if there is one
    STEP/manifest.json          size and checksum of each file, written last

Tables are stored one by one, whichever ranks hold them, so a checkpoint loads into any number of
ranks. A directory that NVIDIA's program saved is read as a checkpoint without optimizers
(`dlrm.train.checkpoints.nvidia`).
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlrm.distributed import World, agreed, gather
from dlrm.documents import brief
from dlrm.manifest import read_manifest
from dlrm.ops import split_float32
from dlrm.train.checkpoints.description import CONFIG, PROGRESS, described_progress
from dlrm.train.checkpoints.nvidia import is_nvidia, read_nvidia
from dlrm.train.checkpoints.saved_model import AVERAGE, SavedModel
from dlrm.train.checkpoints.saved_rows import SavedRows, saved_tables
from dlrm.train.checkpoints.state import (
    INTEGER,
    Parameters,
    TablePart,
    checked_config,
    random_state_file,
    read_tensors,
    tensor_shape,
)
from dlrm.train.checkpoints.writer import CheckpointWriter

__all__ = [
    "Adapted",
    "Parameters",
    "averaged",
    "check_unchanged",
    "load_checkpoint",
    "read_config",
    "read_progress",
    "read_shape",
    "save_checkpoint",
]

Adapted = Callable[[SavedModel], SavedModel]
_ROWS_AT_ONCE = 1 << 16  # of a table that is converted while it is copied


def save_checkpoint(
    directory: str | os.PathLike,
    parameters: Parameters,
    config: dict[str, Any],
    progress: dict[str, Any],
    **others: Any,
) -> None:
    """Writes a checkpoint; arguments and errors are those of `CheckpointWriter`."""
    CheckpointWriter(directory, parameters, config, progress, **others).finish()


def read_config(directory: str | os.PathLike) -> dict[str, Any]:
    """Returns the `config` of a checkpoint, and its `tables`."""
    if is_nvidia(directory):
        return read_nvidia(directory).config
    _check_manifest(directory, CONFIG)
    return checked_config(directory)


def read_progress(directory: str | os.PathLike) -> dict[str, Any]:
    """Returns the `progress` of a checkpoint."""
    if is_nvidia(directory):
        return read_nvidia(directory).progress
    _check_manifest(directory, PROGRESS)
    return described_progress(Path(directory))


def read_shape(directory: str | os.PathLike, name: str) -> list[int]:
    """Returns the shape of one of a checkpoint's weights other than tables.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, or the weight does not exist; the message names it.
    """
    if is_nvidia(directory):
        found = read_nvidia(directory).dense
        if name not in found:
            raise ValueError(f"{directory}: expected a weight {name}, got {', '.join(found)}")
        return list(found[name].shape)
    return tensor_shape(Path(directory, "dense.safetensors"), name)


def averaged(parameters: Parameters) -> Parameters:
    """Returns parameters whose model loads, if saved, the EMA of the weights."""
    return replace(parameters, average=parameters.dense())


def _check_manifest(directory: str | os.PathLike, name: str) -> None:
    read_manifest(Path(directory), "checkpoint", True, lambda file: file == name)


def load_checkpoint(
    directory: str | os.PathLike,
    parameters: Parameters,
    resume: bool = False,
    world: World = World(),
    finite: bool = True,
    optimizers: bool = False,
    adapted: Adapted | None = None,
) -> dict[str, Any]:
    """Reads a checkpoint into a model and, to resume, into its optimizers and torch's generators.

    It changes nothing until all ranks have checked the checkpoint.

    Args:
        parameters: destination; each rank reads its own tables.
        resume: also load optimizer and generator state.
        world: the ranks; their number may differ from that of the run that saved.
        finite: refuse weights that are NaN or infinite.
        optimizers: load the optimizers' state, without the generators', to train on other data.
        adapted: returns the checkpoint as the model takes it, for a run that continues the saved
            one.

    Returns:
        The `progress` of the checkpoint.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, a weight is NaN or infinite, or the architecture differs; the
            message names the file, the weight or all differences.
    """
    directory, with_state = Path(directory), resume or optimizers
    own = {part.table for part in parameters.table_parts()}
    num_tables = len(set().union(*gather(own, world)))
    own_shapes = {name: _shape(tensor) for name, tensor in parameters.dense().items()}
    shapes = {k: v for part in gather(own_shapes, parameters.parts) for k, v in part.items()}
    with agreed(world, ValueError, OSError):
        saved = read_nvidia(directory) if is_nvidia(directory) else _read_ours(directory, own)
        saved = saved if adapted is None else adapted(saved)
        _check_architecture(directory, parameters, shapes, saved, num_tables)
        if finite:
            _check_finite(directory, parameters, saved)
        kinds = [type(optimizer).__name__ for optimizer in parameters.optimizers]
        known = saved.config["optimizers"]
        if with_state and (kinds != known if own or world.size == 1 else set(kinds) - set(known)):
            raise ValueError(f"{directory}: of the optimizers {known}, here {kinds}")
    with torch.no_grad():
        _load_weights(parameters, saved)
        _load_average(directory, parameters, saved)
        if with_state:
            _load_optimizers(directory, parameters, saved)
        if resume:
            _load_random_state(directory, world, parameters.random)
    return saved.progress


def _read_ours(directory: Path, own_tables: set[int]) -> SavedModel:
    """Reads a checkpoint of ours, after verifying the checksums of the files this rank reads."""
    read_manifest(directory, "checkpoint", True, lambda name: _is_read(name, own_tables))
    config = read_config(directory)
    tables, state = saved_tables(directory, config)
    dense = read_tensors(directory / "dense.safetensors")
    progress = described_progress(directory)
    return SavedModel(directory, "dlrm", config, progress, dense, tables, state)


def _is_read(name: str, own_tables: set[int]) -> bool:
    """Returns whether this rank reads a file of a checkpoint."""
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
            f"{directory}: cannot resume with other values, since the run would not continue as it "
            "began:\n  " + "\n  ".join(different)
        )


def _check_architecture(
    directory: Path,
    parameters: Parameters,
    shapes: dict[str, list[int]],
    saved: SavedModel,
    num_tables: int,
) -> None:
    expected: dict[str, Any] = {"tables": num_tables, **shapes}
    found: dict[str, Any] = {"tables": len(saved.tables)}
    found |= {name: _shape(tensor) for name, tensor in saved.dense.items()}
    for table, rows in list(enumerate(saved.tables))[num_tables:]:
        found[f"table {table}"] = [rows.rows, rows.dim]
    for part in parameters.table_parts():
        expected[f"table {part.table}"] = [*part.piece.shape]
        if part.table < len(saved.tables):
            rows = saved.tables[part.table]
            found[f"table {part.table}"] = [rows.rows, rows.dim]
    try:
        _check_same(directory, "another architecture", found, expected)
    except ValueError as error:
        if len(saved.tables) != num_tables:
            raise ValueError(
                f"{error}\n  A checkpoint fits data with the fields that it was trained on, in "
                "their order: prepare the data with these fields, or train a new model"
            ) from None
        smaller = [name for name in expected if name.startswith("table ") and name in found]
        if any(found[name][0] < expected[name][0] for name in smaller):
            raise ValueError(f"{error}\n  --continue_from appends rows to tables") from None
        raise


def _shape(tensor: Tensor) -> list[Any]:
    """Returns the sizes of a tensor, with its dtype unless that is a floating-point type."""
    return [*tensor.shape, *([] if tensor.is_floating_point() else [str(tensor.dtype)])]


def _check_same(directory: Path, what: str, found: dict, expected: dict) -> None:
    different = [
        f"{name}: {found.get(name, 'none')} in the checkpoint, {expected.get(name, 'none')} here"
        for name in {**expected, **found}
        if found.get(name) != expected.get(name)
    ]
    if different:
        more = f"\n  and {len(different) - 8} more" if len(different) > 8 else ""
        raise ValueError(f"{directory}: of {what}:\n  " + "\n  ".join(different[:8]) + more)


def _check_finite(directory: Path, parameters: Parameters, saved: SavedModel) -> None:
    """Raises ValueError if weights that are about to be loaded are NaN or infinite."""
    file = directory if saved.format == "nvidia" else directory / "dense.safetensors"
    for name, tensor in saved.dense.items():
        _refuse_not_finite(f"{file}: {name}", tensor)
    for part in parameters.table_parts():
        rows = saved.tables[part.table]
        for first, block in _blocks(rows, part):
            _refuse_not_finite(f"{rows.path}: row", block, (part.piece.rows[0] + first, 0))


def _refuse_not_finite(what: str, values: Tensor, first: tuple[int, ...] = ()) -> None:
    if not values.is_floating_point() or values.sum().isfinite():
        return  # a sum is fast, and finite if all values are, except very large ones
    for place in (~values.isfinite()).nonzero().tolist():
        got = values[tuple(place)].item()
        shown = [*map(sum, zip(place, first, strict=True))] if first else place
        raise ValueError(f"{what} {shown}: expected a finite weight, got {got}")


def _load_optimizers(directory: Path, parameters: Parameters, saved: SavedModel) -> None:
    """Gives the optimizers the saved state; torch's create theirs only at the first step."""
    weights = dict(parameters.model.named_parameters())
    optimizers = {id(parameter): optimizer for parameter, optimizer in parameters.optimizer_of()}
    file = directory / "optimizer.safetensors"
    for name, value in read_tensors(file).items():
        parameter, _, key = name.rpartition("/")
        if parameter not in weights and parameters.parts.size > 1:
            continue  # of another part
        if parameter not in weights:
            raise ValueError(f"{file}: {brief(name)}: expected the state of a weight of the model")
        weight = weights[parameter]
        state = optimizers[id(weight)].state[weight]
        if key.endswith(INTEGER):
            state[key.removesuffix(INTEGER)] = int(value)
        else:
            state[key] = value.to(weight.device)
            if value.shape == weight.shape:  # torch's fused optimizers need the weight's strides
                state[key] = torch.empty_like(weight, dtype=value.dtype).copy_(value)
    for part in parameters.table_parts():
        table, weight = part.table, part.weight
        for key, rows in saved.table_state[table].items():
            state = optimizers[id(weight)].state[weight]
            if key not in state:  # torch's own optimizers have one of the weight's shape
                state[key] = torch.zeros_like(weight, dtype=torch.float32, requires_grad=False)
            _read_rows(rows, part, state[key][part.begin : part.end])
        for key, number in saved.config["tables"][table].get("scalars", {}).items():
            state = optimizers[id(weight)].state[weight]
            if isinstance(state.get(key), Tensor):
                state[key].fill_(number)
            else:
                state[key] = number if isinstance(number, int) else torch.tensor(number)


def _load_weights(parameters: Parameters, saved: SavedModel) -> None:
    for name, tensor in parameters.dense().items():
        tensor.copy_(saved.dense[name])
    low = parameters.lower_halves()
    for part in parameters.table_parts():
        own, key = slice(part.begin, part.end), id(part.weight)
        rest = low[key][own] if key in low else None
        _read_rows(saved.tables[part.table], part, part.weight[own], rest)


def _load_average(directory: Path, parameters: Parameters, saved: SavedModel) -> None:
    """Loads the EMA of the weights; without a saved one it starts at the weights."""
    if parameters.average:
        file = directory / AVERAGE
        average = read_tensors(file) if file.exists() else saved.dense
        for name, tensor in parameters.average.items():
            tensor.copy_(average[name])


def _load_random_state(directory: Path, world: World, own: torch.Generator | None) -> None:
    """Sets torch's generators, or the model's `own`; a rank without saved state keeps its seed."""
    file = directory / random_state_file(world.rank)
    if not file.is_file():
        return
    state = read_tensors(file)
    if own is not None:
        if own.device.type in state:
            own.set_state(state[own.device.type])
        return
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _read_rows(saved: SavedRows, part: TablePart, rows: Tensor, low: Tensor | None = None) -> None:
    """Reads a part of a table, or of its state, into `rows` and the lower halves into `low`."""
    for begin, block in _blocks(saved, part):
        own = slice(begin, begin + len(block))
        if low is None:
            rows[own] = block.view_as(rows[own])
        else:
            rows[own], low[own] = split_float32(block)


def _blocks(saved: SavedRows, part: TablePart) -> Iterator[tuple[int, Tensor]]:
    """Yields the rows of a part, some at a time, with the number of the first."""
    first, end = part.piece.rows
    for begin in range(first, end, _ROWS_AT_ONCE):
        block = torch.from_numpy(saved.part(begin, min(_ROWS_AT_ONCE, end - begin)))
        yield begin - first, block
