"""Recalibration of a trained model's scores: fitted after the fact, stored in a checkpoint, served.

Every kind is a strictly increasing, piecewise linear map of logits, so that it keeps the ranking,
and every runtime computes it with plain operators. `Predictor` and the exported network apply it to
the network's logit.
"""

import json
import math
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dlrm.command_line import missing_extra
from dlrm.documents import brief, printable, read_json
from dlrm.files import MANIFEST, check_outside, link_or_copy, staged_directory
from dlrm.manifest import check_listed, read_manifest, write_manifest
from dlrm.remote.cache import origin_of
from dlrm.train.checkpoints.directory import last_checkpoint
from dlrm.train.reports.model_card import MODEL_CARD

FOLDER = "recalibration"  # in a checkpoint
_FILE = "recalibration.json"
_SECTION = "\n## Recalibration\n\n"  # the last of a model card
_BINS = 512  # of isotonic regression


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
        return cls(tuple(s if s == "-" else origin_of(s) for s in sources), split)

    def overlap(self, other: "FittedRows") -> bool:
        """Returns whether both have rows of the same file, or of the same split of a dataset."""
        shared = {*self.sources} & {*other.sources} - {"-"}
        return bool(shared) and self.split == other.split

    def __str__(self) -> str:
        return ", ".join(self.sources) + (f" ({self.split})" if self.split else "")


class Recalibration(nn.Module):
    """A piecewise linear map of logits, with given slopes beyond the first and last knot.

    Args:
        kind: method of fitting, such as "platt".
        knots: logits, ascending.
        values: images of the knots, ascending.
        below, above: slopes before the first knot and after the last.
        facts: further entries to store, such as the number of rows that it was fitted to.

    Attributes:
        fitted_to: the rows that it was fitted to; None if unknown or fitted to none.

    Raises:
        ValueError: it would not be strictly increasing.
    """

    def __init__(
        self,
        kind: str,
        knots: np.ndarray,
        values: np.ndarray,
        below: float = 1.0,
        above: float = 1.0,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        ends = np.array([*knots, *values, below, above], np.float64)
        rises = (np.diff(knots) > 0).all() and (np.diff(values) > 0).all() and min(below, above) > 0
        if not len(knots) or len(knots) != len(values) or not rises or not np.isfinite(ends).all():
            raise ValueError(
                f"recalibration ({kind}): expected knots, values and slopes of an increasing map, "
                f"got {brief(list(knots))}, {brief(list(values))}, {below} and {above}"
            )
        self.kind, self.below, self.above = kind, float(below), float(above)
        self.facts = dict(facts or {})
        self.fitted_to: FittedRows | None = None
        x, y = (torch.tensor(np.asarray(array, np.float64)) for array in (knots, values))
        self.knots: Tensor
        self.widths: Tensor
        self.slopes: Tensor
        self.first: Tensor
        self.register_buffer("knots", x.float())
        self.register_buffer("widths", x.diff().float())
        self.register_buffer("slopes", (y.diff() / x.diff()).float())
        self.register_buffer("first", y[0].float())
        self._stored = {"knots": x.tolist(), "values": y.tolist()}

    def forward(self, logits: Tensor) -> Tensor:
        """Returns recalibrated logits, of any shape."""
        apart = logits.unsqueeze(-1) - self.knots
        mapped = self.first + self.below * apart[..., 0].clamp(max=0)
        mapped = mapped + self.above * apart[..., -1].clamp(min=0)
        if len(self.widths):
            risen = torch.minimum(apart[..., :-1].clamp(min=0), self.widths)
            mapped = mapped + (risen * self.slopes).sum(-1)
        return mapped

    def of(self, logits: np.ndarray) -> np.ndarray:
        """Returns recalibrated logits, float32, computed in parts."""
        parts = torch.from_numpy(np.asarray(logits, np.float32)).split(1 << 16)
        return np.concatenate([self(part).numpy() for part in parts] or [np.empty(0, np.float32)])

    def to_json(self) -> dict[str, Any]:
        """Returns the form that `from_json` reads."""
        slopes = {"slope_below": self.below, "slope_above": self.above}
        rows = {} if self.fitted_to is None else {"fitted_to": self.fitted_to._asdict()}
        return {"kind": self.kind, **self._stored, **slopes, "facts": self.facts, **rows}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Recalibration":
        """Makes a recalibration from the result of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: it is damaged.
        """
        knots, values = (np.array(stored[name], np.float64) for name in ("knots", "values"))
        below, above = (float(stored[name]) for name in ("slope_below", "slope_above"))
        made = cls(str(stored["kind"]), knots, values, below, above, dict(stored.get("facts", {})))
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
    return Recalibration("sampling", np.zeros(1), np.array([math.log(rate)]), facts={"rate": rate})


def fit(
    kind: str, logits: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None
) -> Recalibration:
    """Fits a recalibration to scored rows.

    Args:
        kind: "platt" is a logistic regression on the logit; "temperature" is one without an
            intercept (Guo et al., 2017); "isotonic" is an increasing step function of bins, with
            lines between the middles of steps.
        logits: `[rows]`.
        labels: `[rows]`, 0 or 1.
        weights: `[rows]`; None counts every row once.

    Raises:
        ImportError: scikit-learn is missing; see `check_fitting`.
        ValueError: the rows have one class only, or no increasing map fits them.
    """
    weights = np.ones(len(logits)) if weights is None else weights.astype(np.float64)
    clicks, rows = float(weights @ labels), float(weights.sum())
    if not 0 < clicks < rows:
        raise ValueError(
            f"--recalibrate {kind}: expected rows of both classes, got {clicks:g} "
            f"clicks in {rows:g} rows"
        )
    x, y = logits.astype(np.float64), labels.astype(np.float64)
    made = _isotonic(x, y, weights) if kind == "isotonic" else _line(kind, x, y, weights)
    made.facts |= {"rows": len(logits), "clicks": clicks}
    return made


def check_fitting() -> None:
    """Raises ValueError if scikit-learn, which `fit` needs, is missing."""
    try:
        import sklearn  # noqa: F401
    except ImportError as error:
        raise ValueError(f"--recalibrate: {missing_extra(error, 'evaluate')}") from None


def _line(kind: str, x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> Recalibration:
    """Fits a logistic regression, without a penalty, on the logit, for "platt" minus its mean."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    is_platt, held = kind == "platt", weights > 0
    clicked, other = x[held & (y > 0)], x[held & (y == 0)]
    if not is_platt:  # a row is as likely as that of the other class with the negated logit
        clicked, other = np.append(clicked, -other), np.append(other, -clicked)
    if clicked.min() >= other.max() or clicked.max() <= other.min():  # no finite line is the best
        raise _not_rising(kind, "they separate the classes, or are constant")
    middle = float(np.average(x, weights=weights)) if is_platt else 0.0
    regression = LogisticRegression(
        C=np.inf, solver="newton-cholesky", tol=1e-8, fit_intercept=is_platt
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        try:
            regression.fit((x - middle)[:, None], y, sample_weight=weights)
        except ConvergenceWarning:
            raise _not_rising(kind, "the fit does not converge") from None
    slope = float(regression.coef_[0, 0])
    value = float(regression.intercept_[0]) if is_platt else 0.0
    if slope <= 0:
        raise _not_rising(kind, f"the slope is {slope:g}")
    return Recalibration(kind, np.array([middle]), np.array([value]), slope, slope)


def _not_rising(kind: str, got: str) -> ValueError:
    return ValueError(
        f"--recalibrate {kind}: expected scores that rise with the click rate, but {got}"
    )


def _isotonic(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> Recalibration:
    """Fits an isotonic regression of bins of equal weight; bins of one rate become one knot."""
    from sklearn.isotonic import isotonic_regression

    order = np.argsort(x, kind="stable")
    total = np.cumsum(weights[order])
    places = np.minimum((total / total[-1] * _BINS).astype(np.int64), _BINS - 1)
    bins = np.stack(
        [np.bincount(places, w[order], _BINS) for w in (weights, weights * y, weights * x)]
    )
    bins = bins[:, bins[0] > 0]
    rates = isotonic_regression(bins[1] / bins[0], sample_weight=bins[0])
    block = np.unique(rates, return_inverse=True)[1]
    rows, clicks, logits = (np.bincount(block, part) for part in bins)
    chances = (clicks + 0.5) / (rows + 1)  # so that a block of one class has a finite logit
    knots, values = logits / rows, np.log(chances / (1 - chances))
    rises = _rising(knots, values)
    return Recalibration("isotonic", knots[rises], values[rises])


def _rising(knots: np.ndarray, values: np.ndarray) -> list[int]:
    """Returns the indices of knots that exceed all before them, and whose values do."""
    chosen = [0]
    for place in range(1, len(knots)):
        if knots[place] > knots[chosen[-1]] and values[place] > values[chosen[-1]]:
            chosen.append(place)
    return chosen


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


def _note_in_card(card: Path, recalibration: Recalibration) -> None:
    """Adds a section to the model card, if there is one, or replaces it, in a new file."""
    if not card.is_file():
        return
    text = card.read_text(encoding="utf-8").partition(_SECTION)[0]
    facts = ", ".join(f"{name} {value:,}" for name, value in recalibration.facts.items())
    card.unlink()  # it may be a hard link to the other checkpoint's
    note = f"Scores are recalibrated ({recalibration.kind}{': ' + facts if facts else ''})."
    if recalibration.fitted_to is not None:
        note += (
            f" The recalibration was fitted to {printable(recalibration.fitted_to)}, so metrics of "
            "the recalibrated scores of these rows are too good."
        )
    card.write_text(f"{text}{_SECTION}{note}\n", encoding="utf-8")


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
    manifest = read_manifest(checkpoint, "checkpoint")
    with staged_directory(directory) as staging:
        for name in (*manifest["files"], MANIFEST):
            (staging / name).parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(str(checkpoint / name), str(staging / name))
        add_recalibration(staging, recalibration)


def add_recalibration(checkpoint: Path, recalibration: Recalibration) -> None:
    """Adds a recalibration to a checkpoint that is being written, or replaces that which it has."""
    if (stored := load_recalibration(checkpoint)) and stored.to_json() == recalibration.to_json():
        return
    files = read_manifest(checkpoint, "checkpoint")["files"]
    known = {name: facts["crc32"] for name, facts in files.items()}
    shutil.rmtree(checkpoint / FOLDER, ignore_errors=True)
    (checkpoint / FOLDER).mkdir()
    text = json.dumps(recalibration.to_json(), indent=1) + "\n"
    (checkpoint / FOLDER / _FILE).write_text(text, encoding="utf-8")
    _note_in_card(checkpoint / MODEL_CARD, recalibration)
    for name in (f"{FOLDER}/{_FILE}", MODEL_CARD):
        known.pop(name, None)
    write_manifest(checkpoint, "checkpoint", known)
