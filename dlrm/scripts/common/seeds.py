"""`--seeds 1-5`: trains one model for each seed, and saves the mean of their logits as one."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from dlrm.command_line import aligned, say
from dlrm.data.clicks.batch import ClickDataset
from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import open_datasets
from dlrm.distributed import launch
from dlrm.flags import Values
from dlrm.locks import remove_unused
from dlrm.metrics.clicks import click_metrics
from dlrm.metrics.table import SHOWN
from dlrm.model.ensemble import Ensemble
from dlrm.remote.uri import is_uri
from dlrm.serving.loading import load_one
from dlrm.serving.predictor import Predictor
from dlrm.train.checkpoints.checkpoint import read_config, read_progress
from dlrm.train.checkpoints.directory import all_checkpoints, find_checkpoint, step_directory
from dlrm.train.checkpoints.ensemble import write_ensemble
from dlrm.train.log import RunLog
from dlrm.train.reports.console import Kept, NvidiaConsole, Saved, SeriesConsole
from dlrm.train.reports.roles import Roles

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


def train_seeds(
    values: Values,
    train: Callable[[Values, NvidiaConsole | None], Mapping[str, float]],
    commands: Sequence[str],
) -> dict[str, float]:
    """Trains the seeds in sequence, and writes and tests the ensemble; returns its metrics.

    Args:
        train: trains as flags specify, reports to a console, and returns the summary.
    """
    _check(values)
    seeds, path = parse_seeds(values["seeds"]), Path(values["save_checkpoint_path"])
    form = values["log_format"], values["verbose"]
    console = SeriesConsole() if form == ("short", False) else None
    summaries, members = {}, []
    for seed in seeds:
        folder = path / f"seed-{seed}"
        own = {"seed": seed, "seeds": None, "save_checkpoint_path": str(folder)}
        if console:
            console.begin(f"seed {seed}")
        else:
            say(f"seed {seed}: {folder}")
        of_seed = Values({**values, **own}, values.given | {"seed"})
        summaries[f"seed {seed}"] = train(of_seed, console)
        members.append(find_checkpoint(folder))
    step = max(int(read_progress(member)["step"]) for member in members)
    directory = step_directory(path.absolute(), step)
    model = Predictor(Ensemble([load_one(member) for member in members]), None, directory)
    results = _judged(model, values)
    write_ensemble(members, directory, step, results.get("test", {}))
    for earlier in all_checkpoints(path):
        if earlier != directory:
            remove_unused(earlier)
    metrics = {f"{split}_{k}": v for split, found in results.items() for k, v in found.items()}
    told = Roles.from_config(read_config(members[0])) or Roles()
    roles = {split: role for split in results if (role := told.of(split))}
    if console:
        console.begin(f"mean of {len(seeds)}", closes=True)
    with RunLog(path / "log.json", False, *form, console) as log:
        for line in _lines({**summaries, f"mean of {len(seeds)} logits": metrics}):
            log.line(line, short="")
        log.console.kept(Kept(f"mean of {len(seeds)} logits", results, roles))
        log.console.saved(Saved(None, None, directory, directory))
        log.console.suggest(commands)
        log.summary(metrics)
    return metrics


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
    if not values.config(DataConfig).has_clicks or not values["dataset"]:
        raise ValueError(f"{given} needs --dataset, whose test rows judge the models")
    if (processes := launch().size) > 1:
        raise ValueError(f"{given}: expected one process, got {processes}")


def _judged(model: Predictor, values: Values) -> dict[str, dict[str, float]]:
    """Returns the metrics of the splits that a training tests."""
    datasets = open_datasets(values.config(DataConfig))
    splits = {"test": datasets.test, "validation": datasets.validation}
    return {n: _metrics(model, data) for n, data in splits.items() if data and data.num_samples}


def _metrics(model: Predictor, data: ClickDataset) -> dict[str, float]:
    logits: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    weights: list[torch.Tensor] = []
    for index in range(len(data)):
        batch = data.batch(index)
        for values, one in zip((logits, labels), model.score_batch(batch), strict=True):
            values.append(one)
        if batch.weights is not None:
            weights.append(batch.weights)
    return click_metrics(
        torch.from_numpy(np.concatenate(logits)),
        torch.from_numpy(np.concatenate(labels)),
        weights=torch.cat(weights) if weights else None,
    )


def _lines(results: Mapping[str, Mapping[str, float]]) -> Iterable[str]:
    """Returns a table of the models and the ensemble."""
    splits = [s for s in ("test", "validation") if any(f"{s}_auc" in r for r in results.values())]
    names = [f"{split}_{metric}" for split in splits for metric in SHOWN]
    rows = [
        [name, *(f"{one[key]:.6f}" if key in one else "–" for key in names)]
        for name, one in results.items()
    ]
    return aligned(["", *names], rows)
