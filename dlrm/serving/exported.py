"""A model that `dlrm export` wrote, scored by ONNX Runtime: needs no torch."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from dlrm.documents import read_json
from dlrm.serving.network.platforms import require
from dlrm.serving.server.names import FACTS, ONNX

if TYPE_CHECKING:
    from dlrm.serving.server.scorer import OnnxScorer


def exported_version(model: str | os.PathLike) -> Path | None:
    """Returns the directory of an exported version, or None for what is no exported model.

    Args:
        model: a version in a model repository, or a model in it, whose newest version is used.
    """
    path = Path(model)
    versions = [one for one in path.glob("[0-9]*") if one.name.isdecimal()]
    newest = max(versions, key=lambda one: int(one.name), default=path)
    return next((one for one in (path, newest) if (one / FACTS).is_file()), None)


def open_exported(path: Path, batch_size: int) -> "OnnxScorer":
    """Opens an exported version with its transform of raw rows.

    Raises:
        ModuleNotFoundError: ONNX Runtime is not installed; the message has the command.
        FileNotFoundError, ValueError: a file is missing or damaged, or the model was exported for
            another runtime, as a probability or without its transform.
    """
    require("onnxruntime")
    from dlrm.serving.server.scorer import OnnxScorer

    kind = read_json(path / FACTS)["output_kind"]
    if kind != "logit":
        raise ValueError(f"{path}: expected a model exported with --output-kind logit, got {kind}")
    if not (path / ONNX).is_dir():
        raise ValueError(f"{path}: expected {ONNX}, which dlrm export --python and --onnx write")
    scorer = OnnxScorer(path, batch_size)
    if scorer.transform is None:
        raise ValueError(f"{path}: has no transform of raw rows, which dlrm export --python writes")
    return scorer
