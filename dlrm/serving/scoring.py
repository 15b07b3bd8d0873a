"""The base of models that score rows, checkpoints and exported ones, without torch."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dlrm.data import layout
from dlrm.data.sources.row_error import RowError
from dlrm.data.transform.transform import Transform
from dlrm.metrics.ranked import RankedRows
from dlrm.metrics.table import TESTED, unscored_text
from dlrm.serving.rows.inputs import FieldNames, Inputs
from dlrm.serving.rows.shares import Shares

if TYPE_CHECKING:
    from dlrm.model.config import DLRMConfig


class ScoreError(RowError):
    """A row whose score is not finite."""


class Scoring(ABC):
    """A model that scores rows.

    Attributes:
        transform: transform of raw rows; None if the training data had none.
        path: the path that the model was loaded from.
        batch_size: rows scored at a time.
    """

    transform: Transform | None
    path: Path
    batch_size: int

    @abstractmethod
    def logits_of(self, inputs: Inputs) -> np.ndarray:
        """Returns the logits of a model's inputs, float32 `[rows]`."""

    @property
    @abstractmethod
    def network_config(self) -> "DLRMConfig":
        """The architecture of the network, which the rows of datasets must match.

        Raises:
            ValueError: the model does not score datasets.
        """

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

    def tested(self, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """Returns the metrics of scored rows; see `dlrm.metrics.clicks.click_metrics`."""
        found = RankedRows(logits, labels).metrics()
        return {name: found[name] for name in TESTED}


def check_logits(logits: np.ndarray) -> None:
    """Raises ScoreError for the first row whose logit is not finite."""
    if not np.isfinite(logits).all():
        row = int(np.isfinite(logits).argmin())
        raise ScoreError(row, unscored_text(float(logits[row])))


def shares_of(transform: Transform | None) -> Shares:
    """Returns counters of the values that a transform knows."""
    if transform is None:
        return Shares((), ())
    names = transform.schema.numerical_names, transform.schema.categorical_names
    return Shares(*names, [ids > 0 for ids in transform.own_ids], transform.of_ids)


def probability(logits: np.ndarray) -> np.ndarray:
    """Returns 1 / (1 + exp(-logit)), float32: the same for equal logits."""
    # In float32 the last values of an array would be rounded otherwise, and equal rows differ.
    with np.errstate(over="ignore"):
        return (1 / (1 + np.exp(-logits.astype(np.float64)))).astype(np.float32)


def field_names(model: Scoring) -> FieldNames:
    """Returns the names of a model's numerical and categorical fields."""
    return names_of(model.network_config, model.transform)


def names_of(config: "DLRMConfig", transform: Transform | None) -> FieldNames:
    """Returns the names of fields: those of the schema or, without a transform, their numbers."""
    if transform is not None:
        return transform.schema.numerical_names, transform.schema.categorical_names
    return layout.field_names(config.num_numerical_features, len(config.table_sizes))
