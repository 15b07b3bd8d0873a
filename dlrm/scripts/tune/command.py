"""Searches training settings by successive halving, using only the training rows of a dataset.

    python -m dlrm.scripts.tune --dataset DIR --output tuning [--trials 27] [--folds 5]
    python -m dlrm.scripts.main --dataset DIR --flagfile tuning/best.flags

Trials are judged on a held-out share of the training rows, or on folds of them; test and validation
rows are never opened. Settings outside the space are those of `--recipe auto`, as are, in the first
trial, all that the space does not fix. The same command resumes a search that was stopped or
killed, with the same results, and with more --trials extends it. The directory --output gets a
table, tuning.txt, a picture, tuning.png, all numbers, tuning.json, and the best settings as flags,
best.flags. --space names a YAML file of the settings to search:

    lr: {low: 0.0005, high: 0.004, log: true}   # of a range, evenly in its logarithm
    embedding_dim: [8, 16, 32]                  # one of these
    schedule: linear                            # always this
"""

import json
import os
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm.api.defaults import set_aside_default
from dlrm.api.recipe import BATCH_SIZE, DatasetFacts, auto
from dlrm.api.training import SETTINGS
from dlrm.command_line import say, shell_line
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.readers import SplitDataset
from dlrm.documents import brief
from dlrm.files import make_directories, write_atomically
from dlrm.flags import ConfigFlags, run_command
from dlrm.limits import check_processes
from dlrm.manifest import read_sealed, sealed_json
from dlrm.scripts.tune.folds import ORDERS, Part, read_checksums
from dlrm.scripts.tune.halving import JUDGES, Search, Trial, plan
from dlrm.scripts.tune.report import FLAGS, PNG, table, write
from dlrm.scripts.tune.space import Space, default_space
from dlrm.settings import REQUIRED, setting

_BEGUN = "search.json"  # settings that a resumed search must keep
# Settings of the search itself, or that need checkpoints.
_NOT_SEARCHED = (
    "seed",
    "dataset_subset",
    "early_stop",
    "auc_threshold",
    "verify_data",
    "set_aside",
)


@dataclass(frozen=True)
class TuneConfig:
    """The dataset, and the search; field names are those of the flags."""

    dataset: Path = setting(REQUIRED, "directory of the dataset")
    output: Path = setting(REQUIRED, "directory for the search's state and results")
    space: Path | None = setting(
        None, "YAML file of the settings to search; default: a space chosen from the dataset"
    )
    trials: int = setting(27, "number of settings to try")
    rungs: int = setting(3, "maximum number of rungs of the halving")
    eta: int = setting(3, "one trial in this many advances to the next rung")
    folds: int = setting(1, "number of cross-validation folds; 1 holds out --held_out of the rows")
    held_out: float = setting(0.2, "share of the training rows held out with one fold")
    order: str = setting(
        ORDERS[0], "held-out rows: random ones, or the last ones, for logs", choices=ORDERS
    )
    metric: str = setting("auc", "metric to choose by", choices=JUDGES)
    seed: int = setting(1, "random seed")
    processes: int | None = setting(None, "number of trainings at a time; default: one per core")


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    return run_command(
        ConfigFlags([("Flags", TuneConfig)]),
        lambda values: run(values.config(TuneConfig)),
        __doc__,
        arguments,
        usage=2,
        hint="the same command resumes the search",
    )


def run(options: TuneConfig) -> None:
    """Runs the search.

    Raises:
        ValueError, OSError: an error that the user can fix.
    """
    _check(options)
    processes = options.processes or _cores()
    spec = FeatureSpec.load(options.dataset)
    known = [name for name in SETTINGS if name not in _NOT_SEARCHED]
    facts = DatasetFacts.from_dataset(SplitDataset(spec, "train", BATCH_SIZE))
    space = Space.load(options.space, known) if options.space else default_space(facts)
    files = _begin(options, space)
    rungs = plan(options.trials, options.rungs, options.eta, options.folds)
    search = Search(
        dataset=options.dataset,
        checksum=f"{zlib.crc32(json.dumps(files, sort_keys=True).encode()):08x}",
        directory=options.output,
        rungs=rungs,
        parts=_parts(options, {rung.share for rung in rungs}),
        metric=options.metric,
        seed=options.seed,
        processes=processes,
        threads=max(_cores() // processes, 1),
    )
    first = Trial(0, dict(space.fixed))
    drawn = (Trial(n, space.draw(options.seed, n)) for n in range(1, options.trials))
    trials = search.run([first, *drawn], say)
    # Test rows are not opened, and so count as present.
    rows = {split: 1 if split == "test" else spec.num_rows(split) for split in spec.splits}
    aside = set_aside_default(rows)
    trained = facts._replace(rows=round((1 - aside.get("set_aside", 0)) * facts.rows))
    best = aside | auto(trained, trials[0].settings)
    problem = write(options.output, trials, rungs, options.metric, best)
    shutil.rmtree(options.output / "parts", ignore_errors=True)
    for line in table(trials, rungs, options.metric):
        say(line)
    say(problem or f"picture: {options.output / PNG}")
    command = ["python", "-m", "dlrm.scripts.main", "--dataset", str(options.dataset)]
    print(shell_line([*command, "--flagfile", str(options.output / FLAGS)]))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check(options: TuneConfig) -> None:
    for name, least in (("trials", 1), ("rungs", 1), ("eta", 2), ("folds", 1), ("seed", 0)):
        if getattr(options, name) < least:
            raise ValueError(f"--{name} {getattr(options, name)}: expected {least} or more")
    if not 0 < options.held_out < 1:
        raise ValueError(f"--held_out {options.held_out}: expected a share between 0 and 1")
    if options.folds > 1 and options.order != "random":
        raise ValueError(f"--order {options.order} is for --folds 1, got {options.folds} folds")
    if options.processes is not None:
        check_processes("--processes", options.processes)


def _parts(options: TuneConfig, shares: set[float]) -> dict[tuple[int, float], Part]:
    return {
        (fold, share): Part(
            fold, options.folds, options.held_out, options.order, share, options.seed
        )
        for fold in range(options.folds)
        for share in shares
    }


def _begin(options: TuneConfig, space: Space) -> dict[str, str]:
    """Records the settings of a new search, or compares those of a resumed one.

    Returns:
        The checksums of the dataset's files, by relative path.

    Raises:
        FileExistsError: --output is not a search.
        ValueError: the record is not that of a search, or rows, space or flags have changed; the
            message names them.
    """
    output, path = options.output, options.output / _BEGUN
    flags = {
        name: getattr(options, name)
        for name in ("folds", "held_out", "order", "metric", "seed", "eta", "rungs")
    }
    found: dict[str, Any] = {
        "flags": flags,
        "space": json.loads(json.dumps(space.to_dict())),
        "files": read_checksums(options.dataset),
    }
    if not path.exists():
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise FileExistsError(f"{output}: exists, and is no search; name another --output")
        make_directories(output)
        write_atomically(path, sealed_json(found))
        return found["files"]
    begun = read_sealed(path)
    if not all(isinstance(begun.get(section), dict) for section in found):
        raise ValueError(f"{path}: expected {', '.join(found)} of a search, got {brief(begun)}")
    others = f"; {output} was begun with the former, so name another --output"
    for name in begun["files"]:
        if name not in found["files"]:
            raise ValueError(f"{options.dataset / name}: is gone{others}")
    for name, now in found["files"].items():
        if (before := begun["files"].get(name)) != now:
            was = "missing" if before is None else f"CRC-32 {brief(before)}"
            raise ValueError(
                f"{options.dataset / name}: has changed: expected {was}, got CRC-32 {brief(now)}"
                f"{others}"
            )
    for section in ("flags", "space"):
        for name in {**begun[section], **found[section]}:
            before, now = begun[section].get(name), found[section].get(name)
            if before != now:
                where = f"--{name}" if section == "flags" else f"--space, {name}"
                raise ValueError(f"{where}: expected {brief(before)}, got {brief(now)}{others}")
    return found["files"]
