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
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlrm.distributed import World, agreed, gather
from dlrm.documents import brief, read_json
from dlrm.files import MANIFEST, atomic_directory, link_or_copy
from dlrm.locks import in_use
from dlrm.manifest import check_files, digest, files_of, read_manifest, write_manifest
from dlrm.ops import split_float32
from dlrm.remote.uri import origin
from dlrm.train.checkpoints.directory import best_checkpoint, last_checkpoint, read_progress
from dlrm.train.checkpoints.nvidia import NvidiaModel, is_nvidia, read_nvidia
from dlrm.train.checkpoints.state import (
    Parameters,
    TablePart,
    random_state_file,
    read_tensors,
    set_random_state,
    write_tensors,
)
from dlrm.train.checkpoints.tables import SavedRows
from dlrm.train.checkpoints.writer import CONFIG, CheckpointWriter, describe, write_blocks


class Checkpoint:
    """A checkpoint, of ours or in NVIDIA's format; nothing is read before it is asked for.

    Names and the order of weights are those of `dlrm.model.dlrm.DLRM`. All attributes but `path`
    and `format` raise FileNotFoundError if a file is missing, and ValueError if one is damaged;
    the message names it. Checksums of tables are compared by `load` and `verify`, those of all
    other files before they are read.

    Args:
        path: its directory; `open` also takes that of a run.
        feature_order: see `read_nvidia`.

    Attributes:
        format: "dlrm" or "nvidia".
    """

    def __init__(self, path: str | os.PathLike, feature_order: str | None = None):
        self.path, self._feature_order = Path(path), feature_order
        self.format = "nvidia" if is_nvidia(path) else "dlrm"
        self._verified: set[str] = set()

    def __str__(self) -> str:
        return str(self.path)

    @classmethod
    def open(cls, path: str | os.PathLike, newest: bool = False) -> "Checkpoint":
        """Returns the checkpoint at `path`, or the best, or else the last one, of a run.

        Args:
            path: a checkpoint, or a run's directory.
            newest: the last one of a run's directory, even if another is the best.

        Raises:
            FileNotFoundError: there is none.
            ValueError: the record of the best one is damaged.
        """
        path = Path(path)
        if (path / MANIFEST).exists() or is_nvidia(path):
            return cls(path)
        found = (None if newest else best_checkpoint(path)) or last_checkpoint(path)
        if found is None:
            raise FileNotFoundError(f"{path}: no checkpoint here (expected {MANIFEST} or step-*/)")
        return cls(found)

    @classmethod
    @contextmanager
    def held(cls, path: str | os.PathLike, newest: bool = False) -> Iterator["Checkpoint"]:
        """Yields the result of `open`, which is not pruned within the block."""
        while True:
            found = cls.open(path, newest)
            with in_use(found.path) as stays:
                if stays:
                    yield found
                    return

    @property
    def uri(self) -> str:
        """The URI that the checkpoint was fetched from, or its absolute path."""
        return origin(self.path)

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The manifest; every file that it lists exists and has its size."""
        return read_manifest(self.path, "checkpoint")

    @property
    def digest(self) -> str | None:
        """The SHA-256 of the manifest's file; None without a manifest, as in NVIDIA's format."""
        return digest(self.path)

    def verify(self, wanted: Callable[[str], bool] = lambda name: True) -> None:
        """Compares files of ours with their checksums, those with wanted names."""
        if self.format == "dlrm":
            files = files_of(self.manifest, str(self.path / MANIFEST))
            names = [name for name in files if wanted(name) and name not in self._verified]
            check_files(self.path, {name: files[name][1] for name in names})
            self._verified.update(names)

    @cached_property
    def _nvidia(self) -> NvidiaModel | None:
        return read_nvidia(self.path, self._feature_order) if self.format == "nvidia" else None

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration of the training: "flags", "dataset", "optimizers", "tables"."""
        if self._nvidia is not None:
            return self._nvidia.config
        self.verify(lambda name: name == CONFIG)
        return checked_config(self.path)

    @cached_property
    def progress(self) -> dict[str, Any]:
        """The state of the run, "step", "best", "history"; metrics without a value are NaN."""
        if self._nvidia is not None:
            return self._nvidia.progress
        return read_progress(self.path)

    @property
    def notes(self) -> dict[str, str]:
        """Remarks about NVIDIA's format, by name."""
        return {} if self._nvidia is None else self._nvidia.notes

    def saved_flags(self, names: Iterable[str]) -> dict[str, Any]:
        """Returns some of the flags that the checkpoint was saved with; lists become tuples."""
        saved = self.config["flags"]
        found = {name: saved[name] for name in names if name in saved}
        return {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}

    @cached_property
    def dense(self) -> dict[str, Tensor]:
        """The parameters other than tables."""
        return self._tensors("dense") if self._nvidia is None else self._nvidia.dense

    @cached_property
    def optimizer(self) -> dict[str, Tensor]:
        """The state of the optimizers except that of table rows."""
        return self._tensors("optimizer")

    @cached_property
    def average(self) -> dict[str, Tensor]:
        """The EMA of `dense`, which is scored with instead; empty for none."""
        return self._tensors("average")

    def _tensors(self, kind: str) -> dict[str, Tensor]:
        name = f"{kind}.safetensors"
        if self.format == "nvidia" or name not in self.manifest["files"]:
            return {}
        self.verify(lambda other: other == name)
        return read_tensors(self.path / name)

    @cached_property
    def tables(self) -> list[SavedRows]:
        """The tables."""
        if self._nvidia is not None:
            return self._nvidia.tables
        entries = enumerate(self.config["tables"])
        folder = self.path / "tables"
        return [SavedRows(folder / f"{i}.bin", one["rows"], one["dim"]) for i, one in entries]

    @cached_property
    def table_state(self) -> list[dict[str, SavedRows]]:
        """For each table, the optimizer state of its rows, by name."""
        states: list[dict[str, SavedRows]] = []
        for index, table in enumerate(self.tables):
            entry = {} if self._nvidia is not None else self.config["tables"][index]
            states.append({})
            for name in entry.get("state", ()):
                file = self.path / "tables" / f"{index}.{name}.bin"
                dim = file.stat().st_size // 4 // table.rows if table.rows else 0
                states[-1][name] = SavedRows(file, table.rows, dim)
        return states

    @property
    def attached(self) -> list[Path]:
        """The directories in the checkpoint other than that of tables."""
        return sorted(p for p in self.path.iterdir() if p.is_dir() and p.name != "tables")

    def load(
        self,
        into: Parameters,
        world: World = World(),
        resume: bool = False,
        optimizers: bool = False,
        finite: bool = True,
        table_sizes: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """Reads the weights and, to resume, the state of optimizers and torch's generators.

        It changes nothing until all ranks have checked the checkpoint.

        Args:
            into: destination; each rank reads its own tables.
            world: the ranks; their number may differ from that of the run that saved.
            resume: also load optimizer and generator state.
            optimizers: load the optimizers' state, without the generators', to train on other data.
            finite: refuse weights that are NaN or infinite.
            table_sizes: rows of the model's tables, at least as many as are saved. Further ones
                have the initial values of a new table, by its saved seed, and optimizer state 0.

        Returns:
            The `progress` of the checkpoint.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is damaged, a weight is NaN or infinite, or the architecture differs;
                the message names the file, the weight or all differences.
        """
        parts, with_state = [*into.table_parts()], resume or optimizers
        own = {part.table for part in parts}
        num_tables = len(set().union(*gather(own, world)))
        own_shapes = {name: _shape(tensor) for name, tensor in into.dense().items()}
        shapes = {k: v for some in gather(own_shapes, into.parts) for k, v in some.items()}
        with agreed(world, ValueError, OSError):
            self.verify(lambda name: _is_read(name, own))
            tables, states = self.tables, self.table_state
            if table_sizes is not None:
                tables, states = self._grown(into, table_sizes)
            expected = {"tables": num_tables, **shapes}
            expected |= {f"table {part.table}": [*part.shard.shape] for part in parts}
            self._check_architecture(expected, tables, own)
            if finite:
                self._check_finite(parts, tables)
            here, saved = [type(one).__name__ for one in into.optimizers], self.config["optimizers"]
            if with_state and (here != saved if own or world.size == 1 else {*here} - {*saved}):
                raise ValueError(f"{self.path}: of the optimizers {saved}, here {here}")
            average = self.average if into.average else {}
            state = self.optimizer if with_state else {}
        with torch.no_grad():
            low = into.lower_halves()
            for name, tensor in into.dense().items():
                tensor.copy_(self.dense[name])
            for part in parts:
                rest = low[id(part.weight)][part.rows] if id(part.weight) in low else None
                _read_rows(tables[part.table], part, part.weight[part.rows], rest)
            for name, tensor in into.average.items():  # without a saved one it is that of now
                tensor.copy_((average or self.dense)[name])
            if with_state:
                self._load_optimizers(into, state, states)
            file = self.path / random_state_file(world.rank)
            if resume and file.is_file():  # a rank without saved state keeps its seed
                set_random_state(read_tensors(file), into.random)
        return self.progress

    def _grown(
        self, into: Parameters, sizes: Sequence[int]
    ) -> tuple[list[SavedRows], list[dict[str, SavedRows]]]:
        """Returns tables and their state with further rows."""
        flags, count = self.config["flags"], len(self.tables)
        if flags.get("wide"):  # whose tables of weights follow those of vectors
            count //= 2
        before = [table.rows for table in self.tables[:count]]
        if len(sizes) != count:
            raise ValueError(f"{self.path}: expected the rows of {count} tables, got {len(sizes)}")
        for index, (old, new) in enumerate(zip(before, sizes, strict=True)):
            if new < old:
                raise ValueError(
                    f"{self.path}: table {index}: expected {old} rows or more, got {new}"
                )
        if flags.get("hash_indices") and [*sizes] != before:
            raise ValueError(
                f"{self.path}: --hash_indices takes ids modulo the rows of their table, so that "
                "they would mean other rows of a larger one"
            )
        tables, states = [], []
        for index, (table, state) in enumerate(zip(self.tables, self.table_state, strict=True)):
            size = sizes[index % count]
            values: Any = into.model.appended_rows
            added = partial(values, flags, index, (size, table.dim), table.rows)
            tables.append(table.grown(size, added if index < count else None))  # wide: 0
            states.append({name: rows.grown(size) for name, rows in state.items()})
        return tables, states

    def _check_architecture(
        self, expected: dict[str, Any], tables: Sequence[SavedRows], own: set[int]
    ) -> None:
        num_tables, shapes = expected["tables"], self.dense.items()
        found = {"tables": len(tables), **{name: _shape(tensor) for name, tensor in shapes}}
        for index, table in enumerate(tables):
            if index in own or index >= num_tables:
                found[f"table {index}"] = [table.rows, table.dim]
        different = [
            f"{name}: {found.get(name, 'none')} in the checkpoint, {expected.get(name, 'none')} "
            "here"
            for name in {**expected, **found}
            if found.get(name) != expected.get(name)
        ]
        if not different:
            return
        more = f"\n  and {len(different) - 8} more" if len(different) > 8 else ""
        hint = ""
        if len(tables) != num_tables:
            hint = (
                "\n  A checkpoint fits data with the fields that it was trained on, in their "
                "order: prepare the data with these fields, or train a new model"
            )
        elif any(tables[i].rows < expected[f"table {i}"][0] for i in own):
            hint = "\n  --continue_from appends rows to tables"
        raise ValueError(
            f"{self.path}: of another architecture:\n  " + "\n  ".join(different[:8]) + more + hint
        )

    def _check_finite(self, parts: Sequence[TablePart], tables: Sequence[SavedRows]) -> None:
        """Raises ValueError if weights that are about to be loaded are NaN or infinite."""
        file = self.path if self.format == "nvidia" else self.path / "dense.safetensors"
        for name, tensor in self.dense.items():
            _refuse_not_finite(f"{file}: {name}", tensor)
        for part in parts:
            rows = tables[part.table]
            for first, block in rows.blocks(*part.shard.rows):
                _refuse_not_finite(f"{rows.path}: row", torch.from_numpy(block), first)

    def _load_optimizers(
        self,
        into: Parameters,
        saved: Mapping[str, Tensor],
        of_rows: Sequence[Mapping[str, SavedRows]],
    ) -> None:
        """Gives the optimizers the saved state; torch's create theirs only at the first step."""
        weights = dict(into.model.named_parameters())
        states = {id(weight): optimizer.state[weight] for weight, optimizer in into.optimizer_of()}
        for name, value in saved.items():
            parameter, _, key = name.rpartition("/")
            if parameter not in weights and into.parts.size > 1:
                continue  # of another part
            if parameter not in weights:
                raise ValueError(
                    f"{self.path / 'optimizer.safetensors'}: {brief(name)}: expected the state of "
                    "a weight of the model"
                )
            weight = weights[parameter]
            if value.shape == weight.shape:  # torch's fused optimizers need its strides
                value = torch.empty_like(weight, dtype=value.dtype).copy_(value)
            states[id(weight)][key] = value.to(weight.device)
        for part in into.table_parts():
            state = states[id(part.weight)]
            for key, rows in of_rows[part.table].items():
                if key not in state:  # torch's own optimizers have one of the weight's shape
                    like = torch.zeros_like(part.weight, dtype=torch.float32, requires_grad=False)
                    state[key] = like
                _read_rows(rows, part, state[key][part.rows])
            for key, number in self.config["tables"][part.table].get("scalars", {}).items():
                state.setdefault(key, torch.zeros(())).fill_(number)

    @staticmethod
    def save(
        directory: str | os.PathLike,
        parameters: Parameters,
        config: Mapping[str, Any],
        progress: Mapping[str, Any],
        attached: Sequence[Path] = (),
        world: World = World(),
    ) -> None:
        """Writes a checkpoint, on all ranks; see `CheckpointWriter`."""
        CheckpointWriter(directory, parameters, config, progress, attached, world).finish()

    def copy(
        self,
        directory: str | os.PathLike,
        texts: Mapping[str, str] | None = None,
        replace: bool | str = False,
        is_linked: bool = False,
    ) -> None:
        """Writes a copy of the checkpoint; one in NVIDIA's format becomes one of ours.

        Args:
            directory: see `atomic_directory`, also for `replace`.
            texts: contents of further files, or of others instead, by name.
            is_linked: whether files may be links to this checkpoint's.

        Raises:
            OSError: it cannot be written.
        """
        texts, files = texts or {}, {}
        if self._nvidia is None:
            files = files_of(self.manifest, str(self.path / MANIFEST))
        sums = {name: own for name, (_, own) in files.items() if name not in texts}
        with atomic_directory(directory, replace) as staging:
            for name in sums:
                (staging / name).parent.mkdir(parents=True, exist_ok=True)
                copy = link_or_copy if is_linked else shutil.copyfile
                copy(str(self.path / name), str(staging / name))
            if self._nvidia is not None:
                (staging / "tables").mkdir()
                for i, rows in enumerate(self.tables):
                    name = f"tables/{i}.bin"
                    sums[name] = write_blocks(staging / name, rows.blocks())
                write_tensors(self.dense, staging / "dense.safetensors")
                tables = [{"rows": t.rows, "dim": t.dim, "state": []} for t in self.tables]
                described = self.config, self.progress, self.attached
                describe(staging, *described, optimizers=[], tables=tables)
            for name, text in texts.items():
                (staging / name).parent.mkdir(parents=True, exist_ok=True)
                (staging / name).write_text(text, encoding="utf-8")
            write_manifest(staging, "checkpoint", sums)


def _is_read(name: str, own_tables: set[int]) -> bool:
    """Returns whether this rank reads a file of a checkpoint."""
    folder, _, file = name.rpartition("/")
    return folder != "tables" or int(file.partition(".")[0]) in own_tables


def _shape(tensor: Tensor) -> list[Any]:
    """Returns the sizes of a tensor, with its dtype unless that is a floating-point type."""
    return [*tensor.shape, *([] if tensor.is_floating_point() else [str(tensor.dtype)])]


def _refuse_not_finite(what: str, values: Tensor, first: int = 0) -> None:
    if not values.is_floating_point() or values.sum().isfinite():
        return  # a sum is fast, and finite if all values are, except very large ones
    for place in (~values.isfinite()).nonzero().tolist():
        got = values[tuple(place)].item()
        if first:
            place[0] += first
        raise ValueError(f"{what} {place}: expected a finite weight, got {got}")


def _read_rows(saved: SavedRows, part: TablePart, rows: Tensor, low: Tensor | None = None) -> None:
    """Reads a part of a table, or of its state, into `rows` and the lower halves into `low`."""
    first, end = part.shard.rows
    for begin, read in saved.blocks(first, end):
        block, own = torch.from_numpy(read), slice(begin - first, begin - first + len(read))
        if low is None:
            rows[own] = block.view_as(rows[own])
        else:
            rows[own], low[own] = split_float32(block)


def checked_config(directory: str | os.PathLike) -> dict[str, Any]:
    """Returns the `config` of a checkpoint, after checking the form of its sections and tables.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged; the message names the file and the entry.
    """
    path = Path(directory, CONFIG)
    sections: dict[str, Any] = {"flags": {}, "dataset": {}, "optimizers": [], "tables": []}
    config = sections | read_json(path)
    for name, empty in sections.items():
        if not isinstance(config[name], type(empty)):
            expected = "a map" if isinstance(empty, dict) else "a list"
            raise ValueError(f"{path}: {name}: expected {expected}, got {brief(config[name])}")
    for index, table in enumerate(config["tables"]):
        try:
            state, numbers = table["state"], [table["rows"], table["dim"]]
            scalars = [*table.get("scalars", {}).values()]
            is_table = all(type(n) is int and n >= 0 for n in numbers)
            is_table &= all(type(n) in (int, float) for n in scalars)
            is_table &= all(name.isidentifier() for name in state)  # part of a file's name
        except (KeyError, TypeError, AttributeError):
            is_table = False
        if not is_table:
            raise ValueError(
                f"{path}: tables: entry {index}: expected rows, dim and the names of its state, "
                f"got {brief(table)}"
            )
    return config
