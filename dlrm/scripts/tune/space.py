"""Search spaces: settings of a training, each fixed, one of a list, or in a range.

lr: {low: 0.0005, high: 0.004, log: true}   # of a range, evenly in its logarithm
epochs: {low: 1, high: 10}                  # whole numbers, since both ends are
embedding_dim: [8, 16, 32]                  # one of these
top_mlp_sizes: [[256, 128, 1], [512, 1]]    # one of these lists
schedule: linear                            # always this
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dlrm.api.recipe import DatasetFacts, auto
from dlrm.api.training import check_setting_types
from dlrm.documents import brief, read_yaml

_ENTRIES = {"low", "high", "log"}


class Range(NamedTuple):
    """Numbers from `low` to `high`, both included; whole ones if both ends are."""

    low: float
    high: float
    log: bool = False

    def draw(self, random: np.random.Generator) -> float:
        """Returns one of the numbers."""
        if isinstance(self.low, int) and isinstance(self.high, int) and not self.log:
            return int(random.integers(self.low, self.high, endpoint=True))
        if not self.log:
            return float(random.uniform(self.low, self.high))
        drawn = math.exp(random.uniform(math.log(self.low), math.log(self.high)))
        if isinstance(self.low, int) and isinstance(self.high, int):
            return min(max(round(drawn), self.low), self.high)
        return float(f"{drawn:.4g}")  # so that printed values are exactly those tried


@dataclass(frozen=True)
class Space:
    """The settings that a search may choose.

    Attributes:
        fixed: setting -> its value.
        searched: setting -> a range, or a list of values.
    """

    fixed: Mapping[str, Any]
    searched: Mapping[str, Range | Sequence[Any]]

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any], known: Sequence[str], source: str) -> "Space":
        """Makes a space from the content of a file.

        Args:
            facts: setting -> a value, a list of values, or `{low, high, log}`.

        Raises:
            ValueError: a setting is unknown, or a range invalid; the message names it.
        """
        fixed: dict[str, Any] = {}
        searched: dict[str, Range | Sequence[Any]] = {}
        for name, value in facts.items():
            if name not in known:
                raise ValueError(f"{source}: {name}: expected a setting among {', '.join(known)}")
            if isinstance(value, list):
                if not value:
                    raise ValueError(f"{source}: {name}: expected values, got an empty list")
                searched[name] = [tuple(one) if isinstance(one, list) else one for one in value]
            elif isinstance(value, Mapping):
                searched[name] = _range(value, f"{source}: {name}")
            else:
                fixed[name] = value
        for name, values in {**searched, **{name: [one] for name, one in fixed.items()}}.items():
            for one in values[:2] if isinstance(values, Range) else values:
                _check_type(name, one, source)
        return cls(fixed, searched)

    @classmethod
    def load(cls, path: str | os.PathLike, known: Sequence[str]) -> "Space":
        """Reads a space from a YAML file; see `from_dict`."""
        return cls.from_dict(read_yaml(path), known, str(path))

    def to_dict(self) -> dict[str, Any]:
        """Returns the space in the form of a file."""
        ranges = {
            name: values._asdict() if isinstance(values, Range) else list(values)
            for name, values in self.searched.items()
        }
        return {**ranges, **self.fixed}

    def draw(self, seed: int, trial: int) -> dict[str, Any]:
        """Returns the settings of a trial, which depend only on the arguments."""
        random = np.random.default_rng([seed, trial])
        chosen = {
            name: values.draw(random)
            if isinstance(values, Range)
            else values[int(random.integers(len(values)))]
            for name, values in self.searched.items()
        }
        return {**self.fixed, **chosen}


def default_space(facts: DatasetFacts) -> Space:
    """Returns the space of a search without --space, around the settings of `--recipe auto`."""
    usual = auto(facts)
    size, epochs, lr = usual["batch_size"], usual["epochs"], usual["lr"]
    searched: dict[str, Range | Sequence[Any]] = {
        "batch_size": [size // 2, size, 2 * size],
        "epochs": Range(max(epochs // 2, 1), 2 * epochs, log=True),
        "lr": Range(lr / 2, 2 * lr, log=True),
        "embedding_dim": [dim for dim in (8, 16, 32) if dim >= facts.widest] or [facts.widest],
    }
    if l2 := usual.get("embedding_l2"):
        searched["embedding_l2"] = Range(l2 / 10, 5 * l2, log=True)
        searched["dropout"] = [0.1, 0.2, 0.3, 0.4]
    if "numerical_bins" in usual:
        searched["numerical_bins"] = [24, 64, 256]
    return Space({}, searched)


def _range(value: Mapping[str, Any], where: str) -> Range:
    if unknown := [str(name) for name in value if name not in _ENTRIES]:
        raise ValueError(f"{where}: expected low, high and log, got {unknown[0]}")
    low, high, log = value.get("low"), value.get("high"), value.get("log", False)
    for end in (low, high):
        if isinstance(end, bool) or not isinstance(end, int | float) or not math.isfinite(end):
            raise ValueError(f"{where}: expected numbers as low and high, got {brief(end)}")
    assert low is not None
    assert high is not None
    if not isinstance(log, bool):
        raise ValueError(f"{where}: log: expected true or false, got {brief(log)}")
    if not low < high or (log and low <= 0):
        least = " above 0" if log else ""
        raise ValueError(f"{where}: expected low below high{least}, got {low:g} and {high:g}")
    return Range(low, high, log)


def _check_type(name: str, value: Any, source: str) -> None:
    try:
        check_setting_types({name: value})
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
