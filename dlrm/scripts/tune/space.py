"""Spaces of a search: settings, each fixed, one of a list, or in a range."""

import json
from collections.abc import Collection, Mapping
from typing import Any

import optuna

from dlrm.api.recipe import DatasetFacts, auto
from dlrm.api.training import check_setting_types
from dlrm.documents import brief

Space = Mapping[str, Any]


def check_space(space: Space, known: Collection[str], source: str) -> None:
    """Raises ValueError if a setting is unknown or a value or a range invalid; it is named."""
    trial = optuna.create_study(sampler=optuna.samplers.RandomSampler()).ask()
    for name, value in space.items():
        if name not in known:
            raise ValueError(f"{source}: {name}: expected a setting among {', '.join(known)}")
        try:
            suggest(trial, {name: value})
            ends = [value["low"], value["high"]] if isinstance(value, dict) else value
            for one in ends if isinstance(ends, list) else [ends]:
                check_setting_types({name: one})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{source}: {name} {brief(value)}: {error}") from None


def fixed(space: Space) -> dict[str, Any]:
    """Returns the settings that a search does not vary."""
    return {name: value for name, value in space.items() if not isinstance(value, list | dict)}


def suggest(trial: Any, space: Space) -> dict[str, Any]:
    """Returns the settings of a trial of Optuna."""
    settings = fixed(space)
    for name, value in space.items():
        if isinstance(value, list):
            settings[name] = json.loads(trial.suggest_categorical(name, [*map(json.dumps, value)]))
        elif isinstance(value, dict):
            if isinstance(value.get("low"), int) and isinstance(value.get("high"), int):
                settings[name] = trial.suggest_int(name, **value)
            else:  # rounded, so that printed values are exactly those tried
                settings[name] = float(f"{trial.suggest_float(name, **value):.4g}")
    return settings


def default_space(facts: DatasetFacts) -> Space:
    """Returns the space of a search without --space, around the settings of `--recipe auto`."""
    usual = auto(facts)
    size, epochs, lr = usual["batch_size"], usual["epochs"], usual["lr"]
    l2 = usual.get("embedding_l2", 0)
    space = {
        "batch_size": [size // 2, size, 2 * size],
        "epochs": {"low": max(epochs // 2, 1), "high": 2 * epochs, "log": True},
        "lr": {"low": lr / 2, "high": 2 * lr, "log": True},
        "embedding_dim": [8, 16, 32],
        "embedding_l2": {"low": l2 / 10, "high": 5 * l2, "log": True},
        "dropout": [0.1, 0.2, 0.3, 0.4],
        "numerical_bins": [24, 64, 256],
    }
    return {name: value for name, value in space.items() if name in usual}
