"""A model judged on labeled rows: metrics, importance, comparison, recalibration and a picture.

These functions take any `Scorer`, also an exported one, but for `plot`, which shows a training;
they are methods of `dlrm.serving.predictor.Predictor`. Their rows are a table that
`logits` accepts, with the column of labels; a `Dataset` or its directory, of which they read a
split; or the path of a file of rows. Paths may be URIs.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from dlrm.data.tables.frames import is_frame, open_frame
from dlrm.metrics.clicks import click_metrics
from dlrm.metrics.judged import Difference, Interval, ScoredRows, judge
from dlrm.remote.localize import errors_shown, local_path
from dlrm.remote.uri import is_uri
from dlrm.serving.network.recalibration import FittedRows, check_fitting, fit
from dlrm.serving.rows.config import SPLITS
from dlrm.serving.rows.inputs import Inputs
from dlrm.serving.rows.shares import Shares, shares_of
from dlrm.serving.rows.tables import scoring_reader
from dlrm.serving.scoring import Scorer, probability
from dlrm.serving.shown import figure_of
from dlrm.serving.sources import (
    SourceBlock,
    SourceConfig,
    frame_blocks,
    iter_scored_blocks,
    taken_from,
)
from dlrm.serving.wording import in_python, warn
from dlrm.torch_settings import own_settings
from dlrm.train.reports.callbacks import LabelsAndScores, OwnMetrics

if TYPE_CHECKING:
    from dlrm.serving.importance import FieldImportance
    from dlrm.serving.predictor import Predictor

T = TypeVar("T")
S = TypeVar("S", bound=Scorer)
_REPLICATES = 200  # of the bootstrap


def evaluate(
    model: Scorer,
    frame: Any,
    split: str = "test",
    *,
    intervals: bool = False,
    metrics: OwnMetrics | None = None,
) -> dict[str, Any]:
    """Returns metrics of the model's predictions for labeled rows.

    Args:
        frame: a table that `logits` accepts, with the column of labels; a `Dataset` or its
            directory; or the path of a file of rows, as `dlrm.scripts.evaluate` reads it.
        split: split of a dataset: "test", "validation" or "train".
        intervals: return a value with the ends of its 95 % interval for each metric, and more
            metrics; see `dlrm.metrics.judged.judge`.
        metrics: further metrics: name -> function of the labels and the scores, both `[rows]`.

    Returns:
        `auc`; `log_loss` in nats; `normalized_entropy`, the log loss relative to that of always
        predicting the share of positive rows; `calibration`, predicted over observed positive
        rows. See `dlrm.metrics.clicks.click_metrics`.

    Raises:
        ValueError: the model was not trained on a table, there are no rows, a column is
            missing, or a value is unreadable; the message names row and column.
    """
    own, rows = LabelsAndScores(metrics or {}), _scored(model, frame, split)
    (logits,), labels = rows.logits, rows.labels
    values = own(labels, probability(logits))
    if intervals:
        bare = {name: Interval(value, np.nan, np.nan) for name, value in values.items()}
        return judge(rows, _REPLICATES).models[0] | bare
    with own_settings():
        return click_metrics(torch.from_numpy(logits), torch.from_numpy(labels)) | values


def importance(
    model: Scorer, frame: Any, split: str = "test", *, rows: int = 100_000, seed: int = 0
) -> list["FieldImportance"]:
    """Returns the importance of every field by permutation, the most important first.

    Args:
        frame, split: labeled rows that the model was not trained on; see `evaluate`.
        rows: maximum number of rows to measure on, which are evenly spaced.
        seed: seed of the permutations.

    Raises:
        ValueError: rows cannot be read, or have one class; see `evaluate`.
    """
    from dlrm.serving.importance import Sample, permutation_importance

    if rows < 2:
        raise ValueError(f"rows: expected 2 or more, got {rows}")
    sample = Sample(rows)
    _taken(model, frame, split, sample.add)
    inputs, labels = sample.rows()
    if len(np.unique(labels)) < 2:
        raise ValueError(f"importance: expected rows of both classes, got {len(labels)} of one")
    return permutation_importance(model, inputs, labels, seed)


def compare(model: Scorer, other: Scorer, frame: Any, split: str = "test") -> dict[str, Difference]:
    """Compares this model's metrics with another's on the same labeled rows.

    Args:
        other: a model of any fields of the rows.
        frame, split: see `evaluate`.

    Returns:
        Metric -> value of this model minus that of the other, with the bounds of its 95 %
        interval and the p-value of no difference: by DeLong's test for the AUC, by a bootstrap
        of 200 otherwise.

    Raises:
        ValueError: rows cannot be read, see `evaluate`; `other` is no model, or has another
            label.
    """
    if not isinstance(other, Scorer):
        raise ValueError(
            "other: expected a model, as dlrm.load or dlrm.fit returns it, got "
            f"{type(other).__name__}"
        )
    if is_frame(frame):  # a stream can be read only once
        readers = [scoring_reader(one.row_transform, True) for one in (model, other)]
        wanted = {column for reader in readers for column in reader.columns}
        frame = open_frame(frame, sorted(wanted)).read_all()
    own, theirs = _scored(model, frame, split), _scored(other, frame, split)
    if not np.array_equal(own.labels, theirs.labels):
        raise ValueError("other: expected a model of the same label, got one of other labels")
    both = ScoredRows((own.logits[0], theirs.logits[0]), own.labels)
    return judge(both, _REPLICATES).differences


def recalibrate(model: S, frame: Any, split: str = "validation") -> S:
    """Returns a model with the same network whose scores are recalibrated to labeled rows.

    The recalibration is a logistic regression on the logit (Platt, 1999).
    `save` keeps the recalibration, and `dlrm.load`, the exporter and commands apply it. An
    earlier recalibration is replaced. Metrics of the rows given here are too good for it.

    Args:
        frame, split: rows that neither train nor judge the model; see `evaluate`.

    Raises:
        ValueError: rows cannot be read or have one class, no increasing line fits them, or
            scikit-learn is missing.
    """
    with in_python(), errors_shown():
        frame = local_path(frame, "frame") if is_uri(frame) else frame
        check_fitting()
        rows = _scored(model._with_recalibration(None), frame, split)
        fitted = fit(rows.logits[0], rows.labels)
        path = None if is_frame(frame) else getattr(frame, "path", frame)
        if path is not None:
            part = split if os.path.isdir(path) else None
            fitted.fitted_to = FittedRows.from_sources([str(path)], part)
    return model._with_recalibration(fitted)


def plot(model: "Predictor", frame: Any = None, split: str = "test") -> Any:
    """Returns a figure of matplotlib: the training, and on labeled rows calibration and gain.

    Args:
        frame, split: see `evaluate`; None draws the training alone.

    Raises:
        ImportError: matplotlib is missing; the message has the command that installs it.
        ValueError: rows cannot be read; or nothing is to draw.
    """
    return figure_of(model, None if frame is None else _scored(model, frame, split))


def _scored(model: Scorer, frame: Any, split: str = "test") -> ScoredRows:
    """Returns the logits and labels of rows; see `evaluate`."""
    parts = _taken(model, frame, split, lambda inputs, labels: (model.logits_of(inputs), labels))
    logits, labels = map(np.concatenate, zip(*parts, strict=True))
    return ScoredRows((logits,), labels)


@in_python()
def _taken(
    model: Scorer, frame: Any, split: str, take: Callable[[Inputs, np.ndarray], T]
) -> list[T]:
    """Returns the results of a function of the inputs and labels of each block of rows.

    Raises:
        ValueError: there are no rows; see `evaluate`.
    """
    shares, path = shares_of(model.transform), getattr(frame, "path", frame)

    def labeled(block: SourceBlock) -> T:
        if block.labels is None:
            raise ValueError(f"{path}: expected rows with labels, got none")
        return take(block.inputs, block.labels)

    if is_frame(frame) or not isinstance(path, str | os.PathLike):
        blocks = frame_blocks(model, frame, True, shares)
        parts = [*taken_from(blocks, labeled)]
    else:
        if split not in SPLITS:
            raise ValueError(f"split: expected one of {', '.join(SPLITS)}, got {split!r}")

        config = SourceConfig(label=True, split=split, batch_size=model.batch_size)
        with errors_shown():
            source = str(local_path(path, "frame"))
            parts = [*iter_scored_blocks(model, source, config, shares, labeled)]
    warn_of(shares)
    if not parts:
        raise ValueError("frame: expected rows to evaluate, got none")
    return parts


def warn_of(shares: Shares) -> None:
    """Warns of fields without a known value, where the program calls this package."""
    if line := shares.unseen_values_warning():
        warn(line)
