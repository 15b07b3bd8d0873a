"""`--seeds 1-5`: trains one model for each seed, and reports the mean and spread of each metric."""

import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from dlrm.command_line import aligned, say
from dlrm.distributed import launch
from dlrm.flags import Values
from dlrm.metrics.table import SHOWN
from dlrm.remote.uri import is_uri
from dlrm.train.log import RunLog

_MOST = 1000


def parse_seeds(text: str) -> list[int]:
    """Returns the seeds of `--seeds`, such as "1-5" or "1,2,7".

    Raises:
        ValueError: there are fewer than two seeds, or one occurs twice.
    """
    seeds: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", part.strip())
        if not found or int(found[2] or found[1]) - int(found[1]) not in range(_MOST):
            raise ValueError(f"--seeds {text}: expected seeds such as 1-5 or 1,2,7, got {part!r}")
        seeds += range(int(found[1]), int(found[2] or found[1]) + 1)
    if len(seeds) < 2 or len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds {text}: expected two seeds or more, each once")
    return seeds


def train_seeds(values: Values, train: Callable[[Values], Mapping[str, float]]) -> dict[str, float]:
    """Trains the seeds in sequence; returns the mean and the standard deviation of each metric.

    Args:
        train: trains as flags specify, and returns the summary.
    """
    _check(values)
    seeds, path = parse_seeds(values["seeds"]), Path(values["save_checkpoint_path"])
    summaries = {}
    for seed in seeds:
        folder = str(path / f"seed-{seed}")
        say(f"seed {seed}: {folder}")
        own = {"seed": seed, "seeds": None, "save_checkpoint_path": folder}
        summaries[f"seed {seed}"] = train(Values({**values, **own}, values.given | {"seed"}))
    shown = tuple(f"_{metric}" for metric in SHOWN)
    names = [name for name in summaries[f"seed {seeds[0]}"] if name.endswith(shown)]
    names = [name for name in names if not name.startswith("best_")]
    columns = {name: [one[name] for one in summaries.values()] for name in names}
    means = {name: statistics.mean(column) for name, column in columns.items()}
    spreads = {name: statistics.stdev(column) for name, column in columns.items()}
    with RunLog(path / "log.json", log_format=values["log_format"]) as log:
        for line in _lines(names, {**summaries, "mean": means, "spread": spreads}):
            log.line(line)
        summary = means | {f"{name}_spread": spread for name, spread in spreads.items()}
        log.summary(summary)
    return summary


def _check(values: Values) -> None:
    given = f"--seeds {values['seeds']}"
    if values["mode"] != "train":
        raise ValueError(f"{given} contradicts --mode {values['mode']}: only a training has seeds")
    if "seed" in values.given:
        raise ValueError(f"{given} contradicts --seed {values['seed']}")
    if not values["save_checkpoint_path"]:
        raise ValueError(f"{given} needs --save_checkpoint_path, where the models are saved")
    if is_uri(values["save_checkpoint_path"]):
        raise ValueError(
            f"{given} --save_checkpoint_path {values['save_checkpoint_path']}: expected a path of "
            "this machine"
        )
    if (processes := launch().size) > 1:
        raise ValueError(f"{given}: expected one process, got {processes}")


def _lines(names: list[str], results: Mapping[str, Mapping[str, float]]) -> Iterable[str]:
    """Returns a table of the trainings, their means and their standard deviations."""
    rows = [[name, *(f"{one[key]:.6f}" for key in names)] for name, one in results.items()]
    return aligned(["", *names], rows)
