"""A model that `dlrm export` wrote, scored by ONNX Runtime: needs no torch."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dlrm.data.sources.row_error import RowError
from dlrm.documents import read_json
from dlrm.serving.network.platforms import require
from dlrm.serving.rows.inputs import Inputs
from dlrm.serving.scoring import Scoring
from dlrm.serving.server.names import FACTS, ONNX

if TYPE_CHECKING:
    from dlrm.model.config import DLRMConfig


def exported_version(model: str | os.PathLike) -> Path | None:
    """Returns the directory of an exported version, or None for what is no exported model.

    Args:
        model: a version in a model repository, or a model in it, whose newest version is used.
    """
    path = Path(model)
    versions = [one for one in path.glob("[0-9]*") if one.name.isdecimal()]
    newest = max(versions, key=lambda one: int(one.name), default=path)
    return next((one for one in (path, newest) if (one / FACTS).is_file()), None)


class ExportedModel(Scoring):
    """An exported model with the transform of raw rows.

    Args:
        path: a version in a model repository.

    Raises:
        ModuleNotFoundError: ONNX Runtime is not installed; the message has the command.
        FileNotFoundError, ValueError: a file is missing or damaged, or the model was exported for
            another runtime, as a probability or without its transform.
    """

    def __init__(self, path: Path, batch_size: int) -> None:
        require("onnxruntime")
        from dlrm.serving.server.scorer import Scorer

        kind = read_json(path / FACTS)["output_kind"]
        if kind != "logit":
            raise ValueError(
                f"{path}: expected a model exported with --output-kind logit, got {kind}"
            )
        if not (path / ONNX).is_dir():
            raise ValueError(
                f"{path}: expected {ONNX}, which dlrm export --python and --onnx write"
            )
        self.path, self.batch_size = path.absolute(), batch_size
        self._score = Scorer(path, batch_size)
        self.transform = self._score.reader.transform
        if self.transform is None:
            raise ValueError(
                f"{path}: has no transform of raw rows, which dlrm export --python writes"
            )

    @property
    def network_config(self) -> "DLRMConfig":
        """Raises ValueError, as only a checkpoint scores datasets."""
        raise ValueError(
            f"{self.path}: expected raw rows, in a log or a table, for an exported model; its "
            "checkpoint scores datasets"
        )

    def logits_of(self, inputs: Inputs) -> np.ndarray:
        """Returns the logits of a model's inputs, float32 `[rows]`.

        Raises:
            ValueError: their shapes, types or values do not match the model.
            RowError: a row's logit is not finite.
        """
        from dlrm.serving.server.reader import named

        parts: list[np.ndarray] = [np.empty(0, np.float32)]
        for begin in range(0, len(inputs.numerical), self.batch_size):
            (answer,) = self._score([named(inputs.part(begin, begin + self.batch_size))])
            if isinstance(answer, RowError):
                answer.row += begin
            if isinstance(answer, ValueError):
                raise answer
            parts.append(answer[:, 0])
        return np.concatenate(parts)
