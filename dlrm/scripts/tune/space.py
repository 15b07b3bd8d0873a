"""Studies of Optuna, and their spaces: settings, each fixed, one of a list, or in a range.

lr: {low: 0.0005, high: 0.004, log: true}   # of a range, evenly in its logarithm
epochs: {low: 1, high: 10}                  # whole numbers, since both ends are
embedding_dim: [8, 16, 32]                  # one of these
top_mlp_sizes: [[256, 128, 1], [512, 1]]    # one of these lists
schedule: linear                            # always this
"""

import fcntl
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dlrm.api.recipe import DatasetFacts, auto
from dlrm.api.training import check_setting_types
from dlrm.command_line import missing_extra
from dlrm.documents import brief
from dlrm.locks import try_lock

try:
    import optuna
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
    from optuna.trial import TrialState
except ImportError as error:
    raise ValueError(missing_extra(error, "tune")) from error

Space = Mapping[str, Any]
optuna.logging.set_verbosity(optuna.logging.WARNING)


class _Lock(JournalFileOpenLock):
    """Lets one process at a time append to a journal, after removing half a line of a killed one.

    Optuna's own locks outlive a killed process.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def acquire(self) -> bool:
        """Waits for the file."""
        self._file = open(self._path, "rb+")  # noqa: SIM115  # until `release`
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._file.truncate(self._file.read().rfind(b"\n") + 1)
        return True

    def release(self) -> None:
        """Leaves the file to others."""
        self._file.close()


def open_study(journal: Path, metric_rises: bool, eta: int) -> optuna.Study:
    """Opens the study of a journal, or begins one.

    Raises:
        ValueError: the journal cannot be read.
    """
    try:
        backend = JournalFileBackend(str(journal), _Lock(str(journal)))
        return optuna.create_study(
            storage=optuna.storages.JournalStorage(backend),
            study_name="tune",
            direction="maximize" if metric_rises else "minimize",
            pruner=optuna.pruners.SuccessiveHalvingPruner(1, eta),
            load_if_exists=True,
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{journal}: expected a journal of Optuna, got {error!r}; name another --output"
        ) from None


def next_trial(
    study: optuna.Study, folder: Path, trials: int, seed: int
) -> tuple[optuna.Trial, int] | None:
    """Returns a trial that no process has, and its lock, or None if all are done or running.

    Args:
        folder: folder of the locks of trials, which tell killed trials, to run again, from others.
    """
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for one in study.get_trials(states=[TrialState.RUNNING]):
            path = folder / f".trial-{one.number}"
            if (left := try_lock(path)) is not None:
                study.tell(one.number, state=TrialState.FAIL)
                path.unlink()
                os.close(left)
        kept = [one for one in study.get_trials() if one.state != TrialState.FAIL]
        free = {*range(trials)} - {one.user_attrs.get("trial") for one in kept}
        if not free:
            return None
        number = min(free)  # determines the settings drawn, besides what finished trials found
        own = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
        study.sampler = optuna.samplers.TPESampler(seed=own)
        trial = study.ask()
        held = try_lock(folder / f".trial-{trial.number}")
        assert held is not None
        trial.set_user_attr("trial", number)
        return trial, held


def check_space(space: Space, known: Collection[str], source: str) -> None:
    """Raises ValueError if a setting is unknown or a value or a range invalid; it is named."""
    trial = optuna.create_study(sampler=optuna.samplers.RandomSampler()).ask()
    for name, value in space.items():
        if name not in known:
            raise ValueError(f"{source}: {name}: expected a setting among {', '.join(known)}")
        if value == [] or (isinstance(value, dict) and not {"low", "high"} <= {*value}):
            expected = "values" if value == [] else "low, high and log"
            raise ValueError(f"{source}: {name}: expected {expected}, got {brief(value)}")
        try:
            suggest(trial, {name: value})
        except (TypeError, ValueError) as error:  # of the ends of a range
            raise ValueError(f"{source}: {name}: {error}; got {brief(value)}") from None
        ends = [value["low"], value["high"]] if isinstance(value, dict) else value
        for one in ends if isinstance(ends, list) else [ends]:
            try:
                check_setting_types({name: tuple(one) if isinstance(one, list) else one})
            except ValueError as error:
                raise ValueError(f"{source}: {error}") from None


def fixed(space: Space) -> dict[str, Any]:
    """Returns the settings that a search does not vary."""
    return {name: value for name, value in space.items() if not isinstance(value, list | dict)}


def suggest(trial: Any, space: Space) -> dict[str, Any]:
    """Returns the settings of a trial of Optuna."""
    settings = fixed(space)
    for name, value in space.items():
        if isinstance(value, list):
            chosen = json.loads(trial.suggest_categorical(name, [*map(json.dumps, value)]))
            settings[name] = tuple(chosen) if isinstance(chosen, list) else chosen
        elif isinstance(value, dict):
            if isinstance(value["low"], int) and isinstance(value["high"], int):
                settings[name] = trial.suggest_int(name, **value)
            else:  # rounded, so that printed values are exactly those tried
                settings[name] = float(f"{trial.suggest_float(name, **value):.4g}")
    return settings


def default_space(facts: DatasetFacts) -> dict[str, Any]:
    """Returns the space of a search without --space, around the settings of `--recipe auto`."""
    usual = auto(facts)
    size, epochs, lr = usual["batch_size"], usual["epochs"], usual["lr"]
    space: dict[str, Any] = {
        "batch_size": [size // 2, size, 2 * size],
        "epochs": {"low": max(epochs // 2, 1), "high": 2 * epochs, "log": True},
        "lr": {"low": lr / 2, "high": 2 * lr, "log": True},
        "embedding_dim": [8, 16, 32],
    }
    if l2 := usual.get("embedding_l2"):
        space["embedding_l2"] = {"low": l2 / 10, "high": 5 * l2, "log": True}
        space["dropout"] = [0.1, 0.2, 0.3, 0.4]
    if "numerical_bins" in usual:
        space["numerical_bins"] = [24, 64, 256]
    return space
