"""Searches training settings by successive halving."""

import json
import os
import shutil
import zlib
from typing import Any

from dlrm.api.defaults import set_aside_default
from dlrm.api.recipe import BATCH_SIZE, DatasetFacts, auto
from dlrm.api.training import SETTINGS
from dlrm.command_line import say, shell_line
from dlrm.data.clicks.feature_spec import FeatureSpec
from dlrm.data.clicks.readers import SplitDataset
from dlrm.documents import brief
from dlrm.files import make_directories, write_atomically
from dlrm.flags import Values
from dlrm.limits import check_processes
from dlrm.manifest import read_sealed, sealed_json
from dlrm.scripts.tune.flags import TuneConfig
from dlrm.scripts.tune.folds import FoldPart, read_checksums
from dlrm.scripts.tune.halving import Search, Trial, plan_rungs
from dlrm.scripts.tune.report import FLAGS, PNG, table, write
from dlrm.scripts.tune.space import Space, default_space

_BEGUN = "search.json"  # settings that a resumed search must keep
# Settings of the search itself, or that need checkpoints. A teacher may know the held-out rows.
_NOT_SEARCHED = (
    "distill",
    "distill_weight",
    "seed",
    "dataset_subset",
    "early_stop",
    "auc_threshold",
    "verify_data",
    "set_aside",
)


def run(values: Values) -> None:
    """Runs the search."""
    options = values.config(TuneConfig)
    _check(options)
    processes = options.processes or _cores()
    spec = FeatureSpec.load(options.dataset)
    known = [name for name in SETTINGS if name not in _NOT_SEARCHED]
    facts = DatasetFacts.from_dataset(SplitDataset(spec, "train", BATCH_SIZE))
    space = Space.load(options.space, known) if options.space else default_space(facts)
    files = _begin(options, space)
    rungs = plan_rungs(options.trials, options.rungs, options.eta, options.folds)
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
    command = ["dlrm", "train", "--dataset", str(options.dataset)]
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


def _parts(options: TuneConfig, shares: set[float]) -> dict[tuple[int, float], FoldPart]:
    return {
        (fold, share): FoldPart(
            fold, options.folds, options.held_out, options.order, share, options.seed
        )
        for fold in range(options.folds)
        for share in shares
    }


def _begin(options: TuneConfig, space: Space) -> dict[str, str]:
    """Records the settings of a new search, or compares those of a resumed one.

    Returns the checksums of the dataset's files, by relative path.
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
