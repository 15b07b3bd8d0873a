"""The state of a model and its optimizers that a checkpoint holds, and files of tensors."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from dlrm.distributed import World
from dlrm.distributed.placement import Shard
from dlrm.documents import brief

_LOW = "_low"  # suffix of the name of a buffer of lower halves


class TablePart(NamedTuple):
    """The part of a table that a parameter holds.

    Attributes:
        rows: the rows of the parameter that belong to this table.
        shard: the rows of the table that these are.
    """

    table: int
    weight: nn.Parameter
    rows: slice
    shard: Shard


@dataclass(frozen=True)
class Parameters:
    """The parts of a model and its optimizers that a checkpoint holds.

    Attributes:
        tables: parameters that hold embedding tables, with the shards that they hold of tables, by
            the table's number, in order. With several processes these are this one's. The lower
            halves of a bfloat16 parameter are the model's buffer with its name and "_low".
        optimizers: those that update the model.
        average: EMA of the weights, name -> tensor; saved, and loaded when a run resumes.
        parts: the processes that each hold a part of the dense weights, of which the model here is
            this process's; they are adjacent ranks, and a checkpoint holds all parts.
    """

    model: nn.Module
    tables: Sequence[tuple[nn.Parameter, Mapping[int, Shard]]] = ()
    optimizers: Sequence[Optimizer] = ()
    average: Mapping[str, Tensor] = field(default_factory=dict)
    parts: World = World()

    def averaged(self) -> "Parameters":
        """Returns parameters whose model loads, if saved, the EMA of the weights."""
        return replace(self, average=self.dense())

    @property
    def random(self) -> torch.Generator | None:
        """Returns the model's own generator, or None if it draws from torch's default ones."""
        return getattr(self.model, "random", None)

    def dense(self) -> dict[str, Tensor]:
        """Returns name -> tensor for everything in the model's state except tables."""
        tables = {id(parameter) for parameter, _ in self.tables}
        names = {name for name, value in self.model.named_parameters() if id(value) in tables}
        names |= {name + _LOW for name in names}
        return {n: v for n, v in self.model.state_dict().items() if n not in names}

    def lower_halves(self) -> dict[int, Tensor]:
        """Returns `id` of a bfloat16 parameter -> lower halves of its values."""
        buffers = dict(self.model.named_buffers())
        names = ((name, id(parameter)) for name, parameter in self.model.named_parameters())
        return {key: buffers[name + _LOW] for name, key in names if name + _LOW in buffers}

    def table_parts(self) -> Iterator[TablePart]:
        """Yields the parts of tables that this process holds."""
        for parameter, tables in self.tables:
            begin = 0
            for number, shard in tables.items():
                end = begin + shard.num_rows
                yield TablePart(number, parameter, slice(begin, end), shard)
                begin = end

    def optimizer_of(self) -> Iterator[tuple[nn.Parameter, Optimizer]]:
        """Yields every parameter that an optimizer updates, with that optimizer."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield parameter, optimizer

    def optimizer_state(
        self,
    ) -> tuple[dict[int, dict[str, Tensor]], dict[int, dict[str, float]], dict[str, Tensor]]:
        """Splits the optimizers' state into that of table rows, that of whole tables, and the rest.

        Returns:
            Parameter's `id` -> name -> tensor `[rows, ...]`; parameter's `id` -> name -> number,
            for the parameters that hold tables; "parameter/name" -> tensor, for the others.
        """
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        rows: dict[int, dict[str, Tensor]] = {id(parameter): {} for parameter, _ in self.tables}
        scalars: dict[int, dict[str, float]] = {key: {} for key in rows}
        others = {}
        for weight, optimizer in self.optimizer_of():
            key = id(weight)
            for name, value in optimizer.state.get(weight, {}).items():
                if not isinstance(value, Tensor):
                    continue
                if key not in rows:
                    others[f"{names[key]}/{name}"] = value
                elif value.ndim:
                    rows[key][name] = value
                else:
                    scalars[key][name] = value.item()
        return rows, scalars, others


def random_state_file(rank: int) -> str:
    """Returns the name of the file with a rank's `random_state`."""
    return "rng.safetensors" if rank == 0 else f"rng.{rank}.safetensors"


def random_state(own: torch.Generator | None = None) -> dict[str, Tensor]:
    """Returns the state of torch's random generators, with `own` instead of its device's."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state if own is None else {**state, own.device.type: own.get_state()}


def set_random_state(state: Mapping[str, Tensor], own: torch.Generator | None) -> None:
    """Sets torch's generators, or the model's `own`, to a `random_state`."""
    if own is not None:
        if own.device.type in state:
            own.set_state(state[own.device.type])
        return
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def read_tensors(path: str | os.PathLike) -> dict[str, Tensor]:
    """Reads a file of tensors.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or of another format; the message names it.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: missing")
    try:
        return load_file(path)
    except (SafetensorError, RuntimeError, KeyError, TypeError, OSError) as error:
        raise ValueError(f"{path}: damaged, or no safetensors ({brief(error)})") from None


def read_torch(path: str | os.PathLike) -> Any:
    """Reads a file of torch without running code that it contains.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged or would run code; the message names the file, and the code.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        code = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"has code, {code[1]}, which is not run" if code else f"damaged ({brief(error)})"
        raise ValueError(f"{path}: {reason}") from error


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes a file of tensors, with the permissions of its directory.

    safetensors makes files that only their user may read.
    """
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:  # which has the number of the system's error as text
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        raise OSError(f"{path}: {error}") from error
    path.chmod(path.parent.stat().st_mode & 0o666)
