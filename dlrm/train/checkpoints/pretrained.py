"""Loads published weights into a network with the same names, or with other known names."""

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from dlrm.documents import brief
from dlrm.train.checkpoints.state import read_tensors, read_torch

_BERT_NAMES = (  # pattern and replacement, one after the other
    (r"/", "."),  # variables of TensorFlow
    (r"\.layer_(\d+)\.", r".layer.\1."),
    (r"_embeddings$", "_embeddings.weight"),
    (r"^cls\.squad\.output_", "qa_outputs."),
    (r"^output_(weights|bias)$", r"classifier.\1"),
    (r"\.(output_)?weights$", ".weight"),
    (r"\.output_bias$", ".bias"),
    (r"\.gamma$", ".weight"),  # Google's, also when converted to torch
    (r"\.beta$", ".bias"),
    (r"\.dense_act\.", ".dense."),  # NVIDIA's
    (r"^(embeddings|encoder|pooler)\.", r"bert.\1."),  # an encoder alone
)
_NO_WEIGHTS = re.compile(r"^global_step$|(^|[./])(adam|lamb)_[mv]$|\.position_ids$")
_WORDS, _DECODER = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder."
_Rename: TypeAlias = Callable[[str, Tensor], tuple[str, Tensor]]
_PADDED_TO = 8  # NVIDIA pads vocabularies to a multiple of this


def load_weights(model: nn.Module, path: str, heads: tuple[str, ...] = ()) -> list[str]:
    """Loads weights with the names of the model's; reads torch files without running code.

    Args:
        path: `.safetensors`, or a file of torch, possibly with all weights in "state_dict" or
            "model".
        heads: prefixes of names that may be missing or have another number of outputs; these keep
            their values.

    Returns:
        The names of the weights that kept their values.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is of another architecture, or holds anything but dense tensors of
            finite real numbers; the message has the names. Nothing is loaded then.
    """
    return _copy(model, path, _read(path), heads)


def load_bert_weights(model: nn.Module, path: str, heads: tuple[str, ...] = ()) -> list[str]:
    """Loads weights of a BERT, under the names of Hugging Face, NVIDIA or Google.

    Google's weights are read from torch files that were converted from TensorFlow, also under the
    names of its variables; those that end in "kernel" are transposed. A vocabulary that is padded
    to a multiple of 8 is cut, and an unpadded one fills the first words of a padded model.

    Arguments, result and further errors are those of `load_weights`.

    Raises:
        ValueError: the vocabulary differs, or the file decodes masked tokens with another table
            than that of words.
    """
    weights = _read(path, _renamed)
    decoder = {n: weights.pop(n) for n in list(weights) if n.startswith(_DECODER)}
    words = weights.get(_WORDS)
    untied = decoder.get(f"{_DECODER}weight")
    if untied is not None and words is not None and not torch.equal(untied, words):
        raise ValueError(f"{path}: {_DECODER}weight: expected the same values as {_WORDS}")
    if f"{_DECODER}bias" in decoder:
        weights.setdefault("cls.predictions.bias", decoder[f"{_DECODER}bias"])
    own = model.state_dict()
    for name in (_WORDS, "cls.predictions.bias"):
        if name in weights and name in own:
            weights[name] = _fitted(path, weights[name], own[name])
    return _copy(model, path, weights, heads)


def _read(path: str, rename: _Rename = lambda name, value: (name, value)) -> dict[str, Tensor]:
    read = read_tensors if path.endswith(".safetensors") else read_torch
    weights: Any = read(path)
    for key in ("state_dict", "model"):  # training scripts wrap weights in these
        if isinstance(weights, dict) and isinstance(weights.get(key), dict):
            weights = weights[key]
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights):
        raise ValueError(f"{path}: expected names and their weights, got {brief(weights)}")
    named: dict[str, Tensor] = {}
    given: dict[str, str] = {}
    for theirs, value in weights.items():
        if _NO_WEIGHTS.search(theirs):
            continue
        if not _is_dense(value):
            got = type(value).__name__
            if isinstance(value, Tensor):
                got = f"one of {value.dtype}, {value.layout}, on {value.device}"
            raise ValueError(f"{path}: {theirs}: expected a dense tensor of reals, got {got}")
        name, value = rename(theirs.removeprefix("module."), value)
        if name in named:
            raise ValueError(f"{path}: {name}: expected once, got it as {given[name]} and {theirs}")
        named[name], given[name] = value, theirs
    return named


def _is_dense(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    is_other = value.is_meta or value.is_nested or value.is_complex() or value.is_quantized
    return not is_other and value.dtype != torch.bool


def _renamed(name: str, value: Tensor) -> tuple[str, Tensor]:
    for pattern, replacement in _BERT_NAMES:
        name = re.sub(pattern, replacement, name)
    if name.endswith(".kernel"):
        return name.removesuffix("kernel") + "weight", value.T
    return name, value


def _fitted(path: str, words: Tensor, own: Tensor) -> Tensor:
    """Returns the file's entries for the words that the model has."""
    if words.ndim != own.ndim or words.shape[1:] != own.shape[1:]:
        return words  # `_copy` reports the mismatch
    rows, wanted = len(words), len(own)
    fewer, more = sorted((rows, wanted))
    if rows != wanted and more != -(-fewer // _PADDED_TO) * _PADDED_TO:
        raise ValueError(
            f"{path}: has a vocabulary of {rows} words, expected --vocab_size {wanted}, or one "
            f"padded to a multiple of {_PADDED_TO}"
        )
    return torch.cat([words[:wanted], own[rows:].to(words)])


def _copy(
    model: nn.Module, path: str, weights: Mapping[str, Tensor], heads: tuple[str, ...]
) -> list[str]:
    own = model.state_dict()
    counters = {name for name in own if name.endswith("num_batches_tracked")}
    wrong = [
        f"{name} ({'missing' if name in own else 'not known'})"
        for name in sorted((own.keys() - counters) ^ (weights.keys() - counters))
        if not (heads and name.startswith(heads))
    ]
    for name, value in own.items():
        if name in weights and (found := weights[name].shape) != value.shape:
            other_outputs = found[1:] == value.shape[1:] and len(found) == value.ndim
            if not (heads and name.startswith(heads) and other_outputs):
                wrong.append(f"{name} ({list(found)}, expected {list(value.shape)})")
    if wrong:
        raise ValueError(f"{path}: of another architecture; differing: {', '.join(wrong[:8])}")
    fitting = [n for n, v in own.items() if n in weights and weights[n].shape == v.shape]
    for name in fitting:
        numbers = weights[name].to(own[name].dtype)
        if not (finite := numbers.isfinite()).all():
            got = numbers[~finite].flatten()[0].item()
            raise ValueError(f"{path}: {name}: expected finite numbers, got {got}")
    with torch.no_grad():
        for name in fitting:
            own[name].copy_(weights[name])
    return [name for name in own if name not in fitting and name not in counters]
