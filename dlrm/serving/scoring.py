"""The base of models that score rows, checkpoints and exported ones, without torch."""

import copy
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from dlrm.data import layout
from dlrm.data.transform.transform import Transform
from dlrm.serving.rows.inputs import FieldNames, Inputs

if TYPE_CHECKING:
    from dlrm.model.config import DLRMConfig
    from dlrm.serving.network.recalibration import Recalibration


class Scorer(ABC):
    """A model that scores rows: a checkpoint by torch, or an exported version by ONNX Runtime.

    Attributes:
        transform: transform of raw rows; None if the training data had none.
        path: the path that the model was loaded from.
        batch_size: rows scored at a time.
        recalibration: recalibration of the logits of the network; None for none. That of an
            exported version comes after the one that was exported with it.
    """

    transform: Transform | None
    path: Path
    batch_size: int
    recalibration: "Recalibration | None" = None

    @abstractmethod
    def logits_of(self, inputs: Inputs) -> np.ndarray:
        """Returns the logits of a model's inputs, float32 `[rows]`.

        Raises:
            ValueError: their shapes, types or lengths do not match the model.
            RowError: a number is not finite, or an id is outside its table.
            ScoreError: a row's logit is not finite.
        """

    def _with_recalibration(self, recalibration: "Recalibration | None") -> Self:
        other = copy.copy(self)
        other.recalibration = recalibration
        return other

    @property
    def config(self) -> "DLRMConfig | None":
        """The architecture of the network; None for an exported version, for raw rows only."""
        return None

    @property
    def row_transform(self) -> Transform:
        """The transform of raw rows.

        Raises:
            ValueError: there is none.
        """
        if self.transform is None:
            raise ValueError(
                f"{self.path}: has no fitted transform, so it cannot score raw rows; name the "
                "dataset it was trained on, or score a dataset"
            )
        return self.transform

    @property
    def sampling_note(self) -> str | None:
        """Returns a note that scores reflect sampled negatives, unless they were corrected."""
        return None


def probability(logits: np.ndarray) -> np.ndarray:
    """Returns 1 / (1 + exp(-logit)), float32: the same for equal logits."""
    # In float32 the last values of an array would be rounded otherwise, and equal rows differ.
    with np.errstate(over="ignore"):
        return (1 / (1 + np.exp(-logits.astype(np.float64)))).astype(np.float32)


def field_names(model: Scorer) -> FieldNames:
    """Returns the names of a model's numerical and categorical fields.

    They are those of the schema or, without a transform, their numbers.
    """
    if model.transform is not None:
        schema = model.transform.schema
        return schema.numerical_names, schema.categorical_names
    assert model.config is not None
    return layout.field_names(model.config.num_numerical_features, len(model.config.table_sizes))
