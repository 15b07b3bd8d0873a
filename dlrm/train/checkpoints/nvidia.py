"""NVIDIA's directory of a trained DLRM: reads and writes it without running code that it contains.

    bottom_model.mlp.pt             weights and biases of the layers, by torch.save
    top_model.mlp.pt                the same for the top MLP except its last layer
    top_model.out.pt                weight and bias of the last layer
    bottom_model.embeddings.<i>.bin rows of table i, float32
    embeddings.<i>.meta.pt          their shape
    metadata.pt                     epoch, step, device_mapping; values of all flags

The columns of the first top layer follow the order of the vectors in that run, which depends on
version and number of GPUs: natural (that of the dataset), size_sorted (tables by rows, descending)
or device_mapping (rank after rank). Ours is always natural.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dlrm import ops
from dlrm.files import atomic_directory
from dlrm.train.checkpoints.state import read_torch
from dlrm.train.checkpoints.tables import SavedRows
from dlrm.train.checkpoints.writer import write_blocks

if TYPE_CHECKING:
    from dlrm.train.checkpoints.checkpoint import Checkpoint

NATURAL, SIZE_SORTED, DEVICE_MAPPING = "natural", "size_sorted", "device_mapping"
FEATURE_ORDERS = (NATURAL, SIZE_SORTED, DEVICE_MAPPING)
PADDINGS = ONE, MULTIPLE_OF_8 = "one", "multiple_of_8"
_RECORD = "nvidia"  # entry of our config.json: the directory that the checkpoint was made from
_OURS = "dlrm"  # entry of their metadata.pt: the checkpoint that the directory was made from
_DOTS, _CAT = ("cuda_dot", "dot"), "cat"
_INTERACTIONS = (*_DOTS, _CAT)  # those of NVIDIA's code
_ORDER_NAMED = "--feature_order natural or size_sorted of dlrm checkpoint convert --to dlrm"
Layer = tuple[Tensor, Tensor]  # weight [outputs, inputs] and bias


class NvidiaModel(NamedTuple):
    """The contents of NVIDIA's directory, by the names of a `Checkpoint`, in our order of features.

    Attributes:
        config: has under "nvidia" the order and its source, and all that is needed to write the
            same directory again.
        notes: remarks about the format, by name.
    """

    config: dict[str, Any]
    progress: dict[str, Any]
    dense: dict[str, Tensor]
    tables: list[SavedRows]
    notes: dict[str, str]


def is_nvidia(path: str | os.PathLike) -> bool:
    """Returns whether a directory looks like one of NVIDIA's."""
    return any(Path(path, name).is_file() for name in ("bottom_model.mlp.pt", "metadata.pt"))


def read_nvidia(path: Path, feature_order: str | None = None) -> NvidiaModel:
    """Reads a directory of NVIDIA's.

    Args:
        feature_order: order of its vectors, one of `FEATURE_ORDERS`; None reads it from metadata.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged or would run code, sizes do not fit together, or the order
            is unknown.
    """
    metadata = _metadata(path, feature_order)
    theirs, data, own = (_dict_in(metadata, key) for key in ("config", "data", _OURS))
    bottom, top = _mlps(path)
    dim = len(bottom[-1][1])
    tables = _tables(path, dim)
    rows = [table.rows for table in tables]
    order, reason = _order(path, rows, theirs, data, feature_order)
    first, bias = top[0]
    interaction = _interaction(path, theirs, len(tables), dim, first.shape[1])
    columns = _columns(interaction, order, dim)
    padding = first.shape[1] - len(columns)
    dots = interaction in _DOTS
    width = ops.interaction_width(len(order), dim) if dots else len(columns)
    ours = first.new_zeros(len(first), width)
    ours[:, columns] = first[:, : len(columns)]
    top[0] = (_with_padding(ours, first, len(columns)), bias)
    config = {"flags": _plain(theirs), "dataset": {"table sizes": rows}, **_dict_in(own, "config")}
    config["optimizers"] = []
    config["flags"] = config["flags"] | {
        "embedding_dim": dim,
        "bottom_mlp_sizes": [len(bias) for _, bias in bottom],
        "top_mlp_sizes": [len(bias) for _, bias in top],
        "interaction_op": interaction,
    }
    if not own:  # otherwise it is there already, if the model has it
        config[_RECORD] = {"feature_order": order, "padding": padding, "data": _plain(data)}
    progress = {"step": _plain(data.get("step")), "best": {}, "history": []}
    notes = {"feature order": f"{order}, {reason}", "interaction padding": str(padding)}
    progress |= _dict_in(own, "progress")
    return NvidiaModel(config, progress, _dense(bottom, top), tables, notes)


def write_nvidia(
    saved: "Checkpoint",
    directory: str | os.PathLike,
    feature_order: str | None = None,
    padding: str | None = None,
) -> list[int]:
    """Writes a model in the form that NVIDIA's code reads; the directory appears whole or not.

    Args:
        directory: must not exist, or be empty.
        feature_order: natural or size_sorted; None is the order of the directory that the model was
            made from, otherwise size_sorted, which NVIDIA's present code loads on one GPU.
        padding: one of `PADDINGS`, the zeros after the dots; None is the padding of the directory
            that the model was made from, otherwise a multiple of 8.

    Returns:
        The order of features in the directory.

    Raises:
        ValueError: NVIDIA's code does not have such a model.
        OSError: the directory cannot be written, or already exists.
    """
    flags, record = saved.config["flags"], saved.config.get(_RECORD, {})
    interaction = flags.get("interaction_op", "cuda_dot")
    _check_supported(saved, interaction)
    rows, dim = [table.rows for table in saved.tables], saved.tables[0].dim
    order = None if feature_order else record.get("feature_order")
    order = order or _sorted_by(rows, feature_order or SIZE_SORTED)
    columns = _columns(interaction, order, dim)
    zeros = 0
    if interaction in _DOTS:
        to_8 = -len(columns) % 8
        zeros = {None: record.get("padding", to_8), ONE: 1, MULTIPLE_OF_8: to_8}[padding]
    output = saved.dense["output.weight"], saved.dense["output.bias"]
    top = [*_layers_of(saved.dense, "top_mlp"), output]
    ours, bias = top[0]
    first = ours.new_zeros(len(ours), len(columns) + zeros)
    first[:, : len(columns)] = ours[:, columns]
    top[0] = (_with_padding(first, ours, len(columns)), bias)
    weight, bias = top.pop()
    config = {k: v for k, v in saved.config.items() if k not in ("optimizers", "tables")}
    mapping = {"bottom_mlp": 0, "embedding": [order], "vectors_per_gpu": [len(order) + 1]}
    data = {"epoch": 0, "step": saved.progress.get("step", 0), "device_mapping": mapping}
    if order == record.get("feature_order"):
        data |= record["data"]
    own = {"config": config, "progress": saved.progress}
    files: dict[str, Any] = {
        "bottom_model.mlp.pt": _lists(_layers_of(saved.dense, "bottom_mlp")),
        "top_model.mlp.pt": _lists(top),
        "top_model.out.pt": {"weight": weight, "bias": bias},
        "metadata.pt": {"data": data, "config": flags, _OURS: own},
    }
    for index, size in enumerate(rows):
        files[f"embeddings.{index}.meta.pt"] = {"shape": torch.Size((size, dim))}
    with atomic_directory(directory) as staging:
        for name, content in files.items():
            torch.save(content, staging / name)
        for index, table in enumerate(saved.tables):
            write_blocks(staging / f"bottom_model.embeddings.{index}.bin", table.blocks())
        for folder in saved.attached:
            shutil.copytree(folder, staging / folder.name)
    return order


def _check_supported(saved: "Checkpoint", interaction: str) -> None:
    """Raises ValueError unless NVIDIA's code has such a model."""
    parts = {name.split(".")[0] for name in saved.dense}
    if not saved.tables or parts | {"top_mlp"} != {"bottom_mlp", "top_mlp", "output"}:
        raise ValueError(
            f"{saved.path}: expected a DLRM, with tables, bottom_mlp, top_mlp and output; got "
            f"{len(saved.tables)} tables, {', '.join(sorted(parts)) or 'nothing else'}"
        )
    flags = saved.config["flags"]
    own = {
        "--wide": flags.get("wide"),
        "--batch_norm": flags.get("batch_norm"),
        "--ema_decay": flags.get("ema_decay") is not None,
        f"--interaction_op {interaction}": interaction not in _INTERACTIONS,
        "fields that share a table": saved.config["dataset"].get("field tables"),
    }
    if found := [name for name, value in own.items() if value]:
        raise ValueError(f"{saved.path}: {found[0]}: NVIDIA's code does not have it")


def _metadata(path: Path, feature_order: str | None) -> dict[str, Any]:
    try:
        return _read(path / "metadata.pt", "a dict", dict)
    except (FileNotFoundError, ValueError) as error:
        if feature_order in (NATURAL, SIZE_SORTED):
            return {}  # nothing else in it is needed
        raise type(error)(f"{error}. {_ORDER_NAMED} reads the rest without it") from error


def _dict_in(found: dict[str, Any], key: str) -> dict[str, Any]:
    return found[key] if isinstance(found.get(key), dict) else {}


def _read(path: Path, expected: str, form: Callable[[Any], Any]) -> Any:
    """Returns a part of the content of a file, which has another form if `form` fails."""
    found = read_torch(path)
    try:
        return form(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: expected {expected}, got {error!r}") from error


def _mlps(path: Path) -> tuple[list[Layer], list[Layer]]:
    """Returns the layers of the bottom and the top MLP, whose sizes must match in sequence."""

    def layers(found: Any) -> list[Layer]:
        pairs = zip(found["weights"], found["biases"], strict=True)
        return [_checked_layer(weight, bias) for weight, bias in pairs]

    mlps = []
    for name in ("bottom_model", "top_model"):
        mlps.append(_read(path / f"{name}.mlp.pt", "lists of weights and biases", layers))
    last = path / "top_model.out.pt"
    layer = _read(last, "a layer", lambda found: _checked_layer(found["weight"], found["bias"]))
    bottom, top = mlps[0], [*mlps[1], layer]
    if not bottom:
        raise ValueError(f"{path / 'bottom_model.mlp.pt'}: no layers")
    for (before, _), (after, _) in [*pairwise(bottom), *pairwise(top)]:
        if before.shape[0] != after.shape[1]:
            raise ValueError(
                f"{path}: a layer {list(after.shape)} after one of {before.shape[0]} outputs"
            )
    return bottom, top


def _checked_layer(weight: Tensor, bias: Tensor) -> Layer:
    """Returns float32 without gradients: NVIDIA's program saves parameters as such."""
    if weight.ndim != 2 or bias.shape != weight.shape[:1]:
        raise ValueError(f"a weight {list(weight.shape)} with a bias {list(bias.shape)}")
    return weight.detach().float(), bias.detach().float()


def _tables(path: Path, dim: int) -> list[SavedRows]:
    names = [*path.glob("bottom_model.embeddings.*.bin")]
    if not names:
        raise FileNotFoundError(f"{path}: no bottom_model.embeddings.<i>.bin")

    def sizes(found: Any) -> tuple[int, int]:
        rows, dim = map(int, found["shape"])
        return rows, dim

    tables = []
    for index in range(len(names)):
        file = path / f"bottom_model.embeddings.{index}.bin"
        if not file.is_file():
            raise FileNotFoundError(f"{file}: missing, though there are {len(names)} tables")
        meta = path / f"embeddings.{index}.meta.pt"
        rows, found_dim = _read(meta, "a shape of two sizes", sizes)
        if found_dim != dim:
            raise ValueError(
                f"{meta}: rows of {found_dim}, but the bottom MLP in {path} gives vectors of {dim}"
            )
        tables.append(SavedRows(file, rows, dim))
    return tables


def _order(
    path: Path, rows: list[int], flags: dict[str, Any], data: dict[str, Any], asked: str | None
) -> tuple[list[int], str]:
    """Returns the tables in the order of their vectors, and the source of the order."""
    try:
        mapping = [list(map(int, ids)) for ids in data["device_mapping"]["embedding"]]
    except (KeyError, TypeError, ValueError):
        mapping = []
    mapped = [table for ids in mapping for table in ids]
    if mapped and sorted(mapped) != list(range(len(rows))):
        raise ValueError(
            f"{path / 'metadata.pt'}: device_mapping {mapping} is not of {len(rows)} tables"
        )
    if asked == DEVICE_MAPPING:
        if not mapped:
            raise ValueError(f"{path / 'metadata.pt'}: has no device_mapping")
        return mapped, "the device_mapping, as asked for"
    if asked:
        return _sorted_by(rows, asked), f"{asked}, as asked for"
    if len(mapping) > 1 and flags.get("bottom_features_ordered"):
        return _sorted_by(rows, NATURAL), "natural: its run had --bottom_features_ordered"
    if mapped:
        return mapped, "the device_mapping in metadata.pt"
    if "loss_scale" in flags and "bottom_features_ordered" not in flags:
        return _sorted_by(rows, NATURAL), "natural: its flags are of 2020 and of one GPU"
    if rows == sorted(rows, reverse=True):
        return _sorted_by(rows, NATURAL), "natural, which is also by size"
    raise ValueError(
        f"{path}: the order of its vectors cannot be known: metadata.pt has no device_mapping, and "
        "its flags are of versions that sort tables by size on one GPU and not on several; "
        f"{_ORDER_NAMED} names it"
    )


def _sorted_by(rows: Sequence[int], feature_order: str) -> list[int]:
    if feature_order == NATURAL:
        return list(range(len(rows)))
    if feature_order == SIZE_SORTED:
        return sorted(range(len(rows)), key=lambda table: -rows[table])
    raise ValueError(f"--feature_order {feature_order}: expected {NATURAL} or {SIZE_SORTED} here")


def _interaction(path: Path, flags: dict[str, Any], num_tables: int, dim: int, width: int) -> str:
    """Returns the interaction with this many columns; the flags decide between candidates."""
    dots = dim + num_tables * (num_tables + 1) // 2
    fitting: list[str] = []
    if width - dots in (1, -dots % 8):
        fitting += _DOTS
    if width == (num_tables + 1) * dim:
        fitting.append(_CAT)
    named = flags.get("interaction_op")
    if named in fitting:
        return str(named)
    if not fitting or named in _INTERACTIONS:
        raise ValueError(
            f"{path}: the first layer of the top MLP has {width} inputs; expected {dots} and 1 or "
            f"{-dots % 8} of padding for dots of {num_tables} tables and dim {dim}, "
            f"{(num_tables + 1) * dim} for cat"
            + (f"; its flags say --interaction_op {named}" if named else "")
        )
    return fitting[0]


def _columns(interaction: str, order: list[int], dim: int) -> Tensor:
    """Returns, for each of their columns except padding, our column with the same input."""
    vectors = torch.tensor([0, *(table + 1 for table in order)])  # 0 is the bottom MLP's
    if interaction == _CAT:
        return (vectors[:, None] * dim + torch.arange(dim)).flatten()
    assert interaction in _DOTS, interaction
    i, j = torch.tril_indices(len(vectors), len(vectors), offset=-1)
    high = torch.maximum(vectors[i], vectors[j])
    low = torch.minimum(vectors[i], vectors[j])
    return torch.cat([torch.arange(dim), dim + high * (high - 1) // 2 + low])


def _with_padding(target: Tensor, source: Tensor, begin: int) -> Tensor:
    """Copies the columns of padding that both have, so that they are kept; inputs are zero."""
    end = min(target.shape[1], source.shape[1])
    target[:, begin:end] = source[:, begin:end]
    return target


def _dense(bottom: list[Layer], top: list[Layer]) -> dict[str, Tensor]:
    """Returns layers by our names."""
    named = {f"bottom_mlp.{2 * i}": layer for i, layer in enumerate(bottom)}  # between are ReLUs
    named |= {f"top_mlp.{2 * i}": layer for i, layer in enumerate(top[:-1])}
    dense: dict[str, Tensor] = {}
    for name, (weight, bias) in [*named.items(), ("output", top[-1])]:
        dense |= {f"{name}.weight": weight.contiguous(), f"{name}.bias": bias.contiguous()}
    return dense


def _layers_of(dense: Mapping[str, Tensor], mlp: str) -> list[Layer]:
    """Returns the layers of an MLP in order."""
    layers: list[Layer] = []
    while (name := f"{mlp}.{2 * len(layers)}") + ".weight" in dense:
        layers.append((dense[f"{name}.weight"], dense[f"{name}.bias"]))
    return layers


def _lists(layers: Sequence[Layer]) -> dict[str, list[Tensor]]:
    return {"weights": [w for w, _ in layers], "biases": [b for _, b in layers]}


def _plain(value: Any) -> Any:
    """Returns a value in JSON's types; other types become text."""

    def other(value: Any) -> Any:
        return value.tolist() if isinstance(value, Tensor) else str(value)

    return json.loads(json.dumps(value, default=other, skipkeys=True))
