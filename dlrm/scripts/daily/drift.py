"""Differences between the fields of a day and of the day before, and the alarms of a day."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.readers import SplitDataset
from dlrm.preproc.stages.column_statistics import stability_index
from dlrm.scripts.daily.flags import AlarmConfig

_ROWS = 200_000  # compared, of each day: the first ones, which are in random order
_BINS = 10  # of numerical fields, with equally many rows of the day before
_IDS = 30  # most frequent ids of the day before; all others are one bin


def psi_by_field(before: Path, now: Path) -> dict[str, float]:
    """Returns field -> population stability index of a day against the day before.

    Both datasets have the same fields, and the same ids for the same values.
    """
    old, new = _sample(before), _sample(now)
    return {name: _psi(old[name], values) for name, values in new.items()}


def _sample(dataset: Path) -> dict[str, np.ndarray]:
    """Returns field -> its values in a sample of the training rows; of lists, all ids."""
    spec = FeatureSpec.load(dataset)
    batch = SplitDataset(spec, "train", min(_ROWS, spec.num_rows("train"))).batch(0)
    numerical, categorical = spec.channel_spec["numerical"], spec.channel_spec["categorical"]
    values = dict(zip(numerical, batch.numerical.numpy().T, strict=True)) if numerical else {}
    if batch.lengths is None:
        return values | dict(zip(categorical, batch.categorical.numpy().T, strict=True))
    owners = np.repeat(
        np.tile(np.arange(len(categorical)), batch.num_samples), batch.lengths.numpy().ravel()
    )
    ids = batch.categorical.numpy()
    return values | {name: ids[owners == i] for i, name in enumerate(categorical)}


def _psi(before: np.ndarray, now: np.ndarray) -> float:
    if before.dtype.kind == "f":
        edges = np.unique(np.quantile(before.astype(np.float32), np.arange(1, _BINS) / _BINS))
        bins = [np.searchsorted(edges, values, side="right") for values in (before, now)]
        size = len(edges) + 1
    else:
        ids, counts = np.unique(before, return_counts=True)
        kept = np.sort(ids[np.argsort(-counts, kind="stable")[:_IDS]])
        bins, size = [_places(kept, values) for values in (before, now)], len(kept) + 1
    usual, histogram = (np.bincount(places, minlength=size) for places in bins)
    return stability_index(histogram, usual)


def _places(kept: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Returns the place of each id among some, or their number for all others."""
    places = np.minimum(np.searchsorted(kept, ids), len(kept) - 1) if len(kept) else ids * 0
    return np.where(kept[places] == ids, places, len(kept)) if len(kept) else places


def alarms_of(
    bounds: AlarmConfig,
    judged: Mapping[str, float | None],
    fields: Mapping[str, Mapping[str, float]],
) -> list[str]:
    """Returns the alarms of a day, in a sentence each.

    Args:
        judged: metrics of the continued model before it learned the day; empty on the first.
        fields: field -> its `psi` and its share of `unknown` values.
    """
    alarms = []
    calibration = judged.get("calibration")
    if calibration is not None and abs(calibration - 1) > bounds.most_miscalibration:
        alarms.append(
            f"calibration {calibration:.4f} is further from 1 than --most_miscalibration "
            f"{bounds.most_miscalibration}"
        )
    auc = judged.get("auc")
    if bounds.least_auc is not None and auc is not None and auc < bounds.least_auc:
        alarms.append(f"AUC {auc:.4f} is below --least_auc {bounds.least_auc}")
    limits = (("unknown", "most_unknown", "share of unknown values"), ("psi", "most_psi", "PSI"))
    for key, flag, meaning in limits:
        limit = getattr(bounds, flag)
        above = {name: own[key] for name, own in fields.items() if own.get(key, 0) > limit}
        alarms += [
            f"{meaning} of {name}, {value:.4f}, is above --{flag} {limit}"
            for name, value in above.items()
        ]
    return alarms
