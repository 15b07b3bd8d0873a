"""`--recipe auto`: fills in the flags of a training that fit the rows of its dataset."""

from pathlib import Path
from typing import Any

from dlrm.api.defaults import set_aside_default
from dlrm.api.recipe import BATCH_SIZE, DatasetFacts, auto, describe, describe_shortly
from dlrm.data.clicks.config import DataConfig
from dlrm.data.clicks.datasets import Datasets, open_datasets
from dlrm.flags import Values
from dlrm.model.config import ARCHITECTURE
from dlrm.tasks.run import known_checkpoint, saved_flags
from dlrm.train.checkpoints.directory import find_checkpoint
from dlrm.train.reports.console import Line


def with_recipe(values: Values) -> tuple[Values, Line | None]:
    """Returns the flags with those that the recipe chooses, and the line that says them.

    Flags that were given stay. The chosen ones count as given. A run that is resumed has those of
    its checkpoint, and the architecture of weights that are loaded is theirs.

    Raises:
        ValueError, OSError: there is no dataset, or none that a recipe fits; or a flag contradicts
            the recipe.
    """
    if values["recipe"] is None:
        return values, None
    _check(values)
    resumed, loaded = known_checkpoint(values, None), values["load_checkpoint_path"]
    aside = _set_aside(values, resumed)
    facts = DatasetFacts.from_dataset(_open(values, **aside).train)
    given = {name: values[name] for name in values.given}
    if loaded and not resumed:
        given = saved_flags(find_checkpoint(loaded), ARCHITECTURE) | given
    settings = aside | auto(facts, given)
    if resumed:
        settings |= saved_flags(resumed, settings.keys() - given.keys())
    filled = Values(values.filled(settings), values.given | settings.keys())
    return filled, Line(describe(facts, settings, given), describe_shortly(settings, given))


def _set_aside(values: Values, resumed: Path | None) -> dict[str, float]:
    """Returns the share of the training rows to set aside, as a flag; nothing where none is."""
    if "set_aside" in values.given:
        return {"set_aside": values["set_aside"]}
    if resumed:
        return saved_flags(resumed, ["set_aside"])
    return set_aside_default(_open(values).rows())


def _open(values: Values, **own: Any) -> Datasets:
    return open_datasets(
        values.config(DataConfig, verify_data="never", batch_size=BATCH_SIZE, **own)
    )


def takes_recipe(values: Values) -> bool:
    """Returns whether `--recipe auto` could be passed besides flags that have none."""
    if values["recipe"] is not None:
        return False
    try:
        _check(values)
    except ValueError:
        return False
    return True


def _check(values: Values) -> None:
    asked = f"--recipe {values['recipe']}"
    if values["mode"] != "train":
        raise ValueError(f"{asked} contradicts --mode {values['mode']}: only a training has one")
    if not values["dataset"] or values["dataset_type"].startswith("synthetic"):
        raise ValueError(f"{asked} needs --dataset, whose rows the flags are to fit")
