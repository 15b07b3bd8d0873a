"""Settings: fields of configurations that describe themselves, from which flags follow.

A configuration is a frozen dataclass. A field made by `setting` has its meaning, the values that it
takes and its role in checkpoints beside its default. Flags, help, checks, the part of a run that
stays the same when it resumes, and the reference pages follow.
"""

import difflib
import math
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from dlrm.command_line import text_of

REQUIRED: Any = MISSING  # default of a setting that the user has to give
_ELSEWHERE = {  # names in other libraries -> ours
    "learning_rate": "lr",
    **dict.fromkeys(("num_epochs", "n_epochs", "max_epochs", "num_boost_round"), "epochs"),
    **dict.fromkeys(("random_state", "random_seed"), "seed"),
    **dict.fromkeys(("early_stopping_rounds", "early_stopping", "patience"), "early_stop"),
    **dict.fromkeys(("device", "accelerator"), "base_device"),
    **dict.fromkeys(("y", "target", "label_column"), "label"),
    **dict.fromkeys(("sample_weight", "weight_column"), "weight"),
    **dict.fromkeys(("valid", "eval_set", "valid_sets", "validation_data"), "validation"),
    **dict.fromkeys(("eval_metric", "feval"), "metrics"),
    **dict.fromkeys(("callback", "callbacks"), "on_test"),
    **dict.fromkeys(("hidden_units", "hidden_layer_sizes", "layers"), "top_mlp_sizes"),
    **dict.fromkeys(("n_jobs", "num_threads"), "cores"),
    **dict.fromkeys(("model", "model_path"), "checkpoint"),
}


@dataclass(frozen=True)
class Setting:
    """The description of a field; see `setting`."""

    help: str
    topic: str = ""
    choices: tuple[str, ...] | None = None
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    short_name: str | None = None
    positional: bool = False
    repeated: bool = False
    architecture: bool = False
    resumable: bool = False
    uri: str | None = None

    def check(self, name: str, value: Any) -> None:
        """Raises ValueError for a value, or an item of a list, that the setting does not take."""
        if not self.takes(value):
            raise ValueError(f"--{name} {text_of(value)}: expected {self.expected}")

    def takes(self, value: Any) -> bool:
        """Returns whether a value, or every item of a list, is one that the setting takes."""
        items = value if isinstance(value, list | tuple) else [value]
        return all(item is None or self._takes(item) for item in items)

    def _takes(self, value: Any) -> bool:
        if self.choices is not None:
            return value in self.choices
        if isinstance(value, str | bool | Path):  # also "max", of a flag that is otherwise a number
            return self.least is self.most is self.above is self.below is None
        return (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    @property
    def expected(self) -> str:
        """Returns what the setting takes, in words."""
        if self.choices is not None:
            return f"one of {', '.join(self.choices)}"
        bounds = {
            "{} or more": self.least,
            "a number above {}": self.above,
            "{} at most": self.most,
            "less than {}": self.below,
        }
        told = [text.format(bound) for text, bound in bounds.items() if bound is not None]
        return ", ".join(told) or "a finite number"


def setting(default: Any, help: str, *, choices: Iterable[str] | None = None, **others: Any) -> Any:
    """Returns a field of a configuration with its description.

    Args:
        default: the field's default; `REQUIRED` for none.
        help: its meaning for the user; the help adds choices and default.
        choices: the only values that it takes.
        others: `topic` is a heading of the help, if it is not that of the configuration. `least`
            and `most` are bounds of a number, or of each number of a list, both included; `above`
            and `below` are excluded. `short_name` is another name of the flag. A `positional` one
            is an argument without a name. The items of a list have commas between, unless it is
            `repeated`, with a flag or a further word for each item. A checkpoint determines
            settings that are `architecture`, and a resumed run may change those that are
            `resumable`. `uri` says what happens where the value is a URI, such as "read" or
            "write"; see `dlrm.remote.localize.run_locally`.
    """
    names = None if choices is None else tuple(choices)
    return field(default=default, metadata={"setting": Setting(help, choices=names, **others)})


def same_setting(config: type, name: str, **others: Any) -> Any:
    """Returns a field like one of another configuration, but for the `others` of `setting`."""
    (like,) = (field for field in fields(config) if field.name == name)
    own = replace(like.metadata["setting"], **others)
    return field(default=like.default, metadata={"setting": own})


def settings_of(*configs: type) -> dict[str, Setting]:
    """Returns the settings of configurations by name, in the order of their fields."""
    found = (field for config in configs for field in fields(config))
    return {f.name: f.metadata["setting"] for f in found if "setting" in f.metadata}


def defaults_of(*configs: type) -> dict[str, Any]:
    """Returns the default of each setting that has one."""
    found = (field for config in configs for field in fields(config))
    return {
        f.name: f.default for f in found if "setting" in f.metadata and f.default is not REQUIRED
    }


def check_settings(config: Any) -> None:
    """Raises ValueError for a value that its setting does not take; for `__post_init__`."""
    for name, described in settings_of(type(config)).items():
        described.check(name, getattr(config, name))


def architecture_of(*configs: type) -> tuple[str, ...]:
    """Returns the names of the settings that a checkpoint determines."""
    return tuple(name for name, own in settings_of(*configs).items() if own.architecture)


def resumable_of(*configs: type) -> frozenset[str]:
    """Returns the names of the settings that a resumed run may change."""
    return frozenset(name for name, own in settings_of(*configs).items() if own.resumable)


def uris_of(*configs: type) -> dict[str, str]:
    """Returns the settings that may be URIs, with their roles."""
    return {name: own.uri for name, own in settings_of(*configs).items() if own.uri}


def nearest_names(name: str, known: Iterable[str]) -> list[str]:
    """Returns the known names that a user may mean, who knows other libraries; the best first."""
    others = [one for one in known if one != name]
    same = _ELSEWHERE.get(name.replace("-", "_"))
    return [same] if same in others else difflib.get_close_matches(name, others)
