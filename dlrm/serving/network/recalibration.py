"""Recalibration of a trained model's scores: fitted after the fact, stored in a checkpoint, served.

It is an increasing line, so that it keeps the ranking. `Predictor` and the exported network apply
it to the network's logit.
"""

import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dlrm.command_line import missing_extra
from dlrm.documents import brief, printable, read_json
from dlrm.files import check_outside
from dlrm.manifest import check_listed
from dlrm.remote.uri import origin
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.directory import last_checkpoint
from dlrm.train.reports.model_card import MODEL_CARD

FOLDER = "recalibration"  # in a checkpoint
_FILE = "recalibration.json"
_SECTION = "\n## Recalibration\n\n"  # the last of a model card


class FittedRows(NamedTuple):
    """The rows that a recalibration was fitted to.

    Attributes:
        sources: absolute paths or URIs of files, or of a dataset; "-" for standard input.
        split: split of the dataset; None for files.
    """

    sources: tuple[str, ...]
    split: str | None

    @classmethod
    def from_sources(cls, sources: Sequence[str], split: str | None) -> "FittedRows":
        """Returns the rows of sources as commands name them."""
        return cls(tuple(s if s == "-" else origin(s) for s in sources), split)

    def overlap(self, other: "FittedRows") -> bool:
        """Returns whether both have rows of the same file, or of the same split of a dataset."""
        shared = {*self.sources} & {*other.sources} - {"-"}
        return bool(shared) and self.split == other.split

    def __str__(self) -> str:
        return ", ".join(self.sources) + (f" ({self.split})" if self.split else "")


class Recalibration(nn.Module):
    """An increasing line by which logits are mapped: value + slope * (logit - center).

    Args:
        kind: "platt" or "sampling".
        facts: further entries to store, such as the number of rows that it was fitted to.

    Attributes:
        fitted_to: the rows that it was fitted to; None if unknown or fitted to none.

    Raises:
        ValueError: it would not be increasing.
    """

    def __init__(
        self,
        kind: str,
        value: float,
        slope: float = 1.0,
        center: float = 0.0,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if not (math.isfinite(value) and 0 < slope < math.inf and math.isfinite(center)):
            raise ValueError(
                f"recalibration ({kind}): expected an increasing line, got the value {value}, the "
                f"slope {slope} and the center {center}"
            )
        self.kind, self.value, self.slope, self.center = kind, value, slope, center
        self.facts = dict(facts or {})
        self.fitted_to: FittedRows | None = None

    def forward(self, logits: Tensor) -> Tensor:
        """Returns recalibrated logits, of any shape."""
        return self.value + self.slope * (logits - self.center)

    def of(self, logits: np.ndarray) -> np.ndarray:
        """Returns recalibrated logits, float32."""
        return self(torch.from_numpy(np.asarray(logits, np.float32))).numpy()

    def to_json(self) -> dict[str, Any]:
        """Returns the form that `from_json` reads."""
        line = {"value": self.value, "slope": self.slope, "center": self.center}
        rows = {} if self.fitted_to is None else {"fitted_to": self.fitted_to._asdict()}
        return {"kind": self.kind, **line, "facts": self.facts, **rows}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Recalibration":
        """Makes a recalibration from the result of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: it is damaged.
        """
        value, slope, center = (float(stored[name]) for name in ("value", "slope", "center"))
        facts = dict(stored.get("facts", {}))
        made = cls(str(stored["kind"]), value, slope, center, facts)
        if (rows := stored.get("fitted_to")) is not None:
            made.fitted_to = FittedRows(tuple(map(str, rows["sources"])), rows["split"])
        return made


def of_sampling_rate(rate: float) -> Recalibration:
    """Returns the correction of a model that was trained on a sample of the negatives.

    The true odds are those of the model times the rate (He et al., 2014, section 6.3).

    Args:
        rate: share of the negatives that training kept.

    Raises:
        ValueError: it is not in (0, 1].
    """
    if not 0 < rate <= 1:
        raise ValueError(f"--sampling_rate {rate}: expected a share in (0, 1]")
    return Recalibration("sampling", math.log(rate), facts={"rate": rate})


def fit(logits: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None) -> Recalibration:
    """Fits a logistic regression on the logit, without a penalty, to scored rows (Platt, 1999).

    Args:
        logits: `[rows]`.
        labels: `[rows]`, 0 or 1.
        weights: `[rows]`; None counts every row once.

    Raises:
        ImportError: scikit-learn is missing; see `check_fitting`.
        ValueError: the rows have one class only, or no increasing line fits them.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    weights = np.ones(len(logits)) if weights is None else weights.astype(np.float64)
    clicks, rows = float(weights @ labels), float(weights.sum())
    if not 0 < clicks < rows:
        raise ValueError(
            f"--recalibrate: expected rows of both classes, got {clicks:g} clicks in {rows:g} rows"
        )
    x, y, held = logits.astype(np.float64), labels.astype(np.float64), weights > 0
    clicked, other = x[held & (y > 0)], x[held & (y == 0)]
    if clicked.min() >= other.max() or clicked.max() <= other.min():  # no finite line is the best
        raise _not_rising("they separate the classes, or are constant")
    center = float(np.average(x, weights=weights))
    regression = LogisticRegression(C=np.inf, solver="newton-cholesky", tol=1e-8)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        try:
            regression.fit((x - center)[:, None], y, sample_weight=weights)
        except ConvergenceWarning:
            raise _not_rising("the fit does not converge") from None
    slope, value = float(regression.coef_[0, 0]), float(regression.intercept_[0])
    if slope <= 0:
        raise _not_rising(f"the slope is {slope:g}")
    return Recalibration("platt", value, slope, center, {"rows": len(logits), "clicks": clicks})


def _not_rising(got: str) -> ValueError:
    return ValueError(f"--recalibrate: expected scores that rise with the click rate, but {got}")


def check_fitting() -> None:
    """Raises ValueError if scikit-learn, which `fit` needs, is missing."""
    try:
        import sklearn  # noqa: F401
    except ImportError as error:
        raise ValueError(f"--recalibrate: {missing_extra(error, 'evaluate')}") from None


def load_recalibration(checkpoint: Path) -> Recalibration | None:
    """Returns the recalibration that a checkpoint has, or None.

    Raises:
        ValueError: it is damaged; the message names the file.
    """
    path = checkpoint / FOLDER / _FILE
    if not path.is_file():
        return None
    check_listed(checkpoint, FOLDER)
    try:
        return Recalibration.from_json(read_json(path))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a recalibration ({brief(error)})") from error


def recalibrations(continued: Path | None, checkpoints: Path) -> list[Path]:
    """Returns the recalibration that a run's next checkpoint takes over, or nothing.

    Args:
        continued: the checkpoint that the run continues, as long as it is there.
        checkpoints: directory of the run's own checkpoints, the last of which has it already.
    """
    source = last_checkpoint(checkpoints) or continued
    return [source / FOLDER] if source and (source / FOLDER).is_dir() else []


def write_recalibrated(
    checkpoint: Path, recalibration: Recalibration, directory: str | os.PathLike
) -> None:
    """Writes a copy of a checkpoint with a recalibration, with hard links if possible.

    Raises:
        FileExistsError: the directory exists.
        OSError, ValueError: it cannot be written or is inside the checkpoint, or the checkpoint is
            damaged.
    """
    check_outside(directory, checkpoint)
    Checkpoint(checkpoint).copy(directory, texts_of(checkpoint, recalibration), is_linked=True)


def texts_of(checkpoint: Path, recalibration: Recalibration) -> dict[str, str]:
    """Returns the files of a recalibration in a copy of a checkpoint, by name; see `copy`."""
    texts = {f"{FOLDER}/{_FILE}": json.dumps(recalibration.to_json(), indent=1) + "\n"}
    card = checkpoint / MODEL_CARD
    if card.is_file():
        facts = ", ".join(f"{name} {value:,}" for name, value in recalibration.facts.items())
        note = f"Scores are recalibrated ({recalibration.kind}{': ' + facts if facts else ''})."
        if recalibration.fitted_to is not None:
            note += (
                f" The recalibration was fitted to {printable(recalibration.fitted_to)}, so "
                "metrics of the recalibrated scores of these rows are too good."
            )
        text = card.read_text(encoding="utf-8").partition(_SECTION)[0]
        texts[MODEL_CARD] = f"{text}{_SECTION}{note}\n"
    return texts
