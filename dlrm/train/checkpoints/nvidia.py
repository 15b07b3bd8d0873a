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

import os
import pickle
import re
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlrm import ops
from dlrm.files import atomic_directory
from dlrm.train.checkpoints.saved_model import SavedModel, SavedRows, attached_to

NATURAL, SIZE_SORTED, DEVICE_MAPPING = "natural", "size_sorted", "device_mapping"
FEATURE_ORDERS = (NATURAL, SIZE_SORTED, DEVICE_MAPPING)
PADDINGS = ONE, MULTIPLE_OF_8 = "one", "multiple_of_8"
_RECORD = "nvidia"  # entry of our config.json: the directory that the checkpoint was made from
_OURS = "dlrm"  # entry of their metadata.pt: the checkpoint that the directory was made from
_DOTS, _CAT = ("cuda_dot", "dot"), "cat"
_INTERACTIONS = (*_DOTS, _CAT)  # those of NVIDIA's code
_CONVERTER = "dlrm checkpoint convert --to dlrm"


def is_nvidia(path: str | os.PathLike) -> bool:
    """Returns whether a directory looks like one of NVIDIA's."""
    return any(Path(path, name).is_file() for name in ("bottom_model.mlp.pt", "metadata.pt"))


def read_nvidia(
    path: str | os.PathLike, feature_order: str | None = None, any_order: bool = False
) -> SavedModel:
    """Reads a directory of NVIDIA's as a checkpoint of ours.

    Args:
        feature_order: order of its vectors, one of `FEATURE_ORDERS`; None reads it from metadata.
        any_order: assume the natural order if the metadata do not name one.

    Returns:
        The model. Its `config` has under "nvidia" the order and its source, and all that is needed
        to write the same directory again.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged or would run code, sizes do not fit together, or the order
            is unknown.
    """
    path = Path(path)
    metadata = _metadata(path, feature_order, any_order)
    theirs, data, own = (_dict_in(metadata, key) for key in ("config", "data", _OURS))
    bottom, top = _mlps(path)
    dim = len(bottom[-1][1])
    tables = _tables(path, dim)
    rows = [table.rows for table in tables]
    order, reason = _order(path, rows, theirs, data, feature_order)
    if order is None and not any_order:
        raise ValueError(
            f"{path}: {reason}; --feature_order natural or size_sorted of {_CONVERTER} names it"
        )
    order = order or list(range(len(tables)))
    first, bias = top[0]
    interaction = _interaction(path, theirs, len(tables), dim, first.shape[1])
    padding = first.shape[1] - len(_columns(interaction, order, dim))
    top[0] = (_to_ours(first, interaction, order, dim), bias)
    step = data.get("step")
    config = {
        "flags": _plain(theirs),
        "dataset": {"table sizes": rows},
        **_dict_in(own, "config"),
        "optimizers": [],
    }
    config["flags"] = config["flags"] | {
        "embedding_dim": dim,
        "bottom_mlp_sizes": [len(bias) for _, bias in bottom],
        "top_mlp_sizes": [len(bias) for _, bias in top],
        "interaction_op": interaction,
    }
    if not own:  # otherwise it is there already, if the model has it
        config[_RECORD] = {"feature_order": order, "padding": padding, "data": _plain(data)}
    notes = {"feature order": f"{order}, {reason}", "interaction padding": str(padding)}
    return SavedModel(
        path,
        "nvidia",
        config,
        {"step": _plain(step), "best": {}, "history": [], **_dict_in(own, "progress")},
        _dense(bottom, top),
        tables,
        attached=attached_to(path),
        notes=notes,
    )


def write_nvidia(
    saved: SavedModel,
    directory: str | os.PathLike,
    feature_order: str | None = None,
    padding: str | None = None,
) -> list[int]:
    """Writes a model in the form that NVIDIA's code reads; the directory appears whole or not.

    Args:
        directory: must not exist, or be empty.
        feature_order: natural or size_sorted; None is the order of the directory that the model was
            made from, otherwise natural.
        padding: one of `PADDINGS`, the zeros after the dots; None is the padding of the directory
            that the model was made from, otherwise a multiple of 8.

    Returns:
        The order of features in the directory.

    Raises:
        ValueError: NVIDIA's code does not have such a model.
        OSError: the directory cannot be written, or already exists.
    """
    _check_dlrm(saved)
    flags, record = saved.config.get("flags", {}), saved.config.get(_RECORD, {})
    rows, dim = [table.rows for table in saved.tables], saved.tables[0].dim
    order = _sorted_by(rows, feature_order) if feature_order else None
    order = order or record.get("feature_order") or _sorted_by(rows, NATURAL)
    assert order is not None
    interaction = _known_interaction(saved)
    hidden = [f"top_mlp.{2 * i}" for i in range(len(_of(saved.dense, "top_mlp")))]
    first = _layer(saved.dense, hidden[0] if hidden else "output")[0]
    to_8 = -len(_columns(interaction, order, dim)) % 8
    zeros = {None: record.get("padding", to_8), ONE: 1, MULTIPLE_OF_8: to_8}[padding]
    top = [_layer(saved.dense, name) for name in [*hidden, "output"]]
    zeros = zeros if interaction in _DOTS else 0
    top[0] = (_to_theirs(first, interaction, order, dim, zeros), top[0][1])
    last = dict(zip(("weight", "bias"), top.pop(), strict=True))
    config = {k: v for k, v in saved.config.items() if k not in ("optimizers", "tables")}
    mapping = {"bottom_mlp": 0, "embedding": [order], "vectors_per_gpu": [len(order) + 1]}
    data = {"epoch": 0, "step": saved.progress.get("step", 0), "device_mapping": mapping}
    if order == record.get("feature_order"):
        data |= record["data"]
    with atomic_directory(directory) as staging:
        _save(staging / "bottom_model.mlp.pt", _of(saved.dense, "bottom_mlp"))
        _save(staging / "top_model.mlp.pt", top)
        torch.save(last, staging / "top_model.out.pt")
        for index, table in enumerate(saved.tables):
            table.copy_to(staging / f"bottom_model.embeddings.{index}.bin")
            meta = {"shape": torch.Size((table.rows, dim))}
            torch.save(meta, staging / f"embeddings.{index}.meta.pt")
        own = {"config": config, "progress": saved.progress}
        torch.save({"data": data, "config": flags, _OURS: own}, staging / "metadata.pt")
        for folder in saved.attached:
            shutil.copytree(folder, staging / folder.name)
    return order


Layer = tuple[Tensor, Tensor]  # weight [outputs, inputs] and bias


def _check_dlrm(saved: SavedModel) -> None:
    parts = {name.split(".")[0] for name in saved.dense}
    known = {"bottom_mlp", "top_mlp", "output"}
    if not saved.tables or parts | {"top_mlp"} != known:
        raise ValueError(
            f"{saved.path}: expected a DLRM, with tables, bottom_mlp, top_mlp and output; got "
            f"{len(saved.tables)} tables, {', '.join(sorted(parts)) or 'nothing else'}"
        )
    if saved.config.get("dataset", {}).get("field tables"):
        raise ValueError(
            f"{saved.path}: expected a table for each field, got fields that share one (table in "
            "the schema), which NVIDIA's code does not have, so the model cannot be written for it"
        )
    flags = saved.config.get("flags", {})
    own = [f"--{name}" for name in ("wide", "batch_norm") if flags.get(name)]
    own += ["--ema_decay"] if flags.get("ema_decay") is not None else []
    if own:
        raise ValueError(
            f"{saved.path}: {own[0]}: NVIDIA's code does not have it, so the model cannot be "
            "written for it"
        )


def _known_interaction(saved: SavedModel) -> str:
    found = saved.config.get("flags", {}).get("interaction_op", "cuda_dot")
    if found not in _INTERACTIONS:
        raise ValueError(
            f"{saved.path}: --interaction_op {found}: NVIDIA's code has {', '.join(_INTERACTIONS)} "
            "only, so the model cannot be written for it"
        )
    return found


def _metadata(path: Path, feature_order: str | None, any_order: bool) -> dict[str, Any]:
    try:
        found = _load(path / "metadata.pt")
        if not isinstance(found, dict):
            raise ValueError(f"{path / 'metadata.pt'}: expected a dict, got {type(found)}")
        return found
    except (FileNotFoundError, ValueError) as error:
        if any_order or feature_order in (NATURAL, SIZE_SORTED):
            return {}  # nothing else in it is needed
        raise type(error)(
            f"{error}. --feature_order natural or size_sorted of {_CONVERTER} reads the rest "
            "without it"
        ) from error


def _dict_in(found: dict[str, Any], key: str) -> dict[str, Any]:
    return found[key] if isinstance(found.get(key), dict) else {}


def _load(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        what = re.search(r"GLOBAL (\S+)", str(error))
        raise ValueError(
            f"{path}: has more than tensors, numbers, text, lists and dicts"
            f"{f' ({what[1]})' if what else ''}; that could run code and is not loaded"
        ) from error
    except (RuntimeError, EOFError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: damaged ({str(error).splitlines()[0]})") from error


def _mlps(path: Path) -> tuple[list[Layer], list[Layer]]:
    """Returns the layers of the bottom and the top MLP, whose sizes must match in sequence."""
    bottom, top = _layers(path / "bottom_model.mlp.pt"), _layers(path / "top_model.mlp.pt")
    top.append(_last_layer(path / "top_model.out.pt"))
    for file, layers in (("bottom_model.mlp.pt", bottom), ("top_model.out.pt", top)):
        _check_chain(path / file, layers)
    return bottom, top


def _layers(path: Path) -> list[Layer]:
    found = _load(path)
    try:
        weights, biases = found["weights"], found["biases"]
        return [(_matrix(w), _plain_tensor(b)) for w, b in zip(weights, biases, strict=True)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{path}: expected lists of weights and biases of the same length, got {error!r}"
        ) from error


def _last_layer(path: Path) -> Layer:
    found = _load(path)
    try:
        return _matrix(found["weight"]), _plain_tensor(found["bias"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: expected a weight and a bias, got {error!r}") from error


def _matrix(weight: Tensor) -> Tensor:
    if weight.ndim != 2:
        raise ValueError(f"a weight of shape {list(weight.shape)}")
    return _plain_tensor(weight)


def _plain_tensor(tensor: Tensor) -> Tensor:
    """Returns float32 without a gradient: NVIDIA's program saves parameters as such."""
    return tensor.detach().float()


def _check_chain(path: Path, layers: list[Layer]) -> None:
    if not layers:
        raise ValueError(f"{path}: no layers")
    for weight, bias in layers:
        if bias.shape != weight.shape[:1]:
            raise ValueError(
                f"{path}: a weight {list(weight.shape)} with a bias {list(bias.shape)}"
            )
    for (before, _), (after, _) in pairwise(layers):
        if before.shape[0] != after.shape[1]:
            raise ValueError(
                f"{path}: a layer {list(after.shape)} after one of {before.shape[0]} outputs"
            )


def _tables(path: Path, dim: int) -> list[SavedRows]:
    names = {p.name for p in path.glob("bottom_model.embeddings.*.bin")}
    if not names:
        raise FileNotFoundError(f"{path}: no bottom_model.embeddings.<i>.bin")
    tables = []
    for index in range(len(names)):
        file = path / f"bottom_model.embeddings.{index}.bin"
        if file.name not in names:
            raise FileNotFoundError(f"{file}: missing, though there are {len(names)} tables")
        meta = path / f"embeddings.{index}.meta.pt"
        found = _load(meta)
        try:
            rows, found_dim = (int(size) for size in found["shape"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{meta}: expected a shape of two sizes, got {error!r}") from error
        if found_dim != dim:
            raise ValueError(
                f"{meta}: rows of {found_dim}, but the bottom MLP in {path} gives vectors of {dim}"
            )
        tables.append(SavedRows(file, rows, dim))
    return tables


def _order(
    path: Path,
    rows: list[int],
    flags: dict[str, Any],
    data: dict[str, Any],
    asked: str | None,
) -> tuple[list[int] | None, str]:
    """Returns the tables in the order of their vectors, or None, and the source of the order."""
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
    return None, (
        "the order of its vectors cannot be known: metadata.pt has no device_mapping, and its "
        "flags are of versions that sort tables by size on one GPU and not on several"
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


def _to_ours(theirs: Tensor, interaction: str, order: list[int], dim: int) -> Tensor:
    columns = _columns(interaction, order, dim)
    dots = interaction in _DOTS
    width = ops.interaction_width(len(order), dim) if dots else len(columns)
    ours = theirs.new_zeros(len(theirs), width)
    ours[:, columns] = theirs[:, : len(columns)]
    return _with_padding(ours, theirs, len(columns))


def _to_theirs(ours: Tensor, interaction: str, order: list[int], dim: int, padding: int) -> Tensor:
    columns = _columns(interaction, order, dim)
    theirs = ours.new_zeros(len(ours), len(columns) + padding)
    theirs[:, : len(columns)] = ours[:, columns]
    return _with_padding(theirs, ours, len(columns))


def _with_padding(target: Tensor, source: Tensor, begin: int) -> Tensor:
    """Copies the columns of padding that both have, so that they are kept; inputs are zero."""
    end = min(target.shape[1], source.shape[1])
    target[:, begin:end] = source[:, begin:end]
    return target


def _dense(bottom: list[Layer], top: list[Layer]) -> dict[str, Tensor]:
    """Returns layers by our names."""
    dense: dict[str, Tensor] = {}
    for name, layers in (("bottom_mlp", bottom), ("top_mlp", top[:-1])):
        for index, layer in enumerate(layers):
            dense |= _named(f"{name}.{2 * index}", layer)  # ReLUs are between
    return dense | _named("output", top[-1])


def _named(name: str, layer: Layer) -> dict[str, Tensor]:
    return {f"{name}.weight": layer[0].contiguous(), f"{name}.bias": layer[1].contiguous()}


def _layer(dense: dict[str, Tensor], name: str) -> Layer:
    return dense[f"{name}.weight"], dense[f"{name}.bias"]


def _of(dense: dict[str, Tensor], mlp: str) -> list[Layer]:
    """Returns the layers of an MLP in order."""
    names = {name.rpartition(".")[0] for name in dense if name.startswith(f"{mlp}.")}
    return [_layer(dense, name) for name in sorted(names, key=lambda n: int(n.split(".")[1]))]


def _save(path: Path, layers: list[Layer]) -> None:
    torch.save({"weights": [w for w, _ in layers], "biases": [b for _, b in layers]}, path)


def _plain(value: Any) -> Any:
    """Returns a value in JSON's types; other types become text."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, Tensor):
        return value.tolist()
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
