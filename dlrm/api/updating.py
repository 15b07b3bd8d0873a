"""`model.update`: trains a model on with further rows, such as those of the next day."""

import dlrm.environment  # noqa: F401  # first: torch reads it when it is loaded

# isort: split
import os
from collections.abc import Mapping
from typing import Any

from dlrm.api.dataset import Dataset
from dlrm.api.training import (
    OF_CONTINUING,
    SETTINGS,
    Training,
    Watch,
    checked,
    train_and_load,
    warn_of_a_poor_fit,
)
from dlrm.distributed import choose_device
from dlrm.serving.predictor import Predictor
from dlrm.serving.wording import in_python
from dlrm.tasks.config import CARRIED, REWARM
from dlrm.tasks.recipe import set_aside_default, training_defaults
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.reports.callbacks import Callbacks, LabelsAndScores, OnStep, OwnMetrics
from dlrm.train.schedule import OF_NVIDIA


def update(
    model: Predictor,
    data: Any,
    *,
    test: Any = None,
    validation: Any = None,
    metrics: OwnMetrics | None = None,
    on_test: OnStep | None = None,
    on_step: OnStep | None = None,
    progress: bool | None = None,
    verbose: bool = False,
    save_checkpoint_path: str | os.PathLike | None = None,
    base_device: str | None = None,
    **settings: Any,
) -> Predictor:
    """Trains a model on with further rows, and returns the new model; `model` does not change.

    Weights and optimizers continue where the model's checkpoint ended, as by `dlrm train
    --continue_from`. Settings that you leave open are those of its training, except for `epochs`,
    which is 1, and the schedule, which begins again and fits the new rows.

    Args:
        model: a model of `dlrm.fit`, `dlrm.load` or `update`.
        data: the rows: a table in memory, a `Dataset`, or a dataset's directory or URI. The
            dictionaries of a dataset must be those of the model, perhaps with further values at
            their ends, for which the tables grow. Those of a table become so, as by `dlrm prepare
            --extend`.
        test, validation: tables with the rows of these splits, where `data` is a table.
        metrics, on_test, on_step, progress, verbose, save_checkpoint_path, base_device: see
            `dlrm.fit`.
        settings: see `dlrm.fit`; also `continue_lr`, of which `"schedule"` continues with the
            schedule and `"constant"` keeps `lr`.

    Raises:
        TypeError: an unknown setting.
        ValueError: the dataset has other dictionaries or fewer ids, a setting would change the
            network, a table does not fit the model's schema, or the model is a mean of several.
        FileNotFoundError: the model's checkpoint, or the dataset, no longer exists.
        FileExistsError: `save_checkpoint_path` has checkpoints of an earlier run.
        FloatingPointError: the loss is NaN or infinite.
    """
    with in_python():
        paths = {"data": data, "save_checkpoint_path": save_checkpoint_path}
        chosen = checked(update, settings, {*SETTINGS, *OF_CONTINUING}, paths)
        watch = Watch(Callbacks(on_step, on_test), LabelsAndScores(metrics or {}), progress)
        splits = {"test": test, "validation": validation}
        if isinstance(data, Dataset | str | os.PathLike):
            dataset = data if isinstance(data, Dataset) else Dataset(data)
            if given := [name for name, table in splits.items() if table is not None]:
                raise ValueError(
                    f"{given[0]}: is for a table in memory; {dataset.path} is a dataset"
                )
        else:
            dataset = dataset_of_frames(model, {"train": data, **splits})
        with Checkpoint.held(model.path) as checkpoint:
            values = _settings(dataset, checkpoint, chosen)
            device = choose_device(base_device)
            training = Training(dataset, values, device, watch, checkpoint)
            made = train_and_load(training, save_checkpoint_path, verbose)
    if made.recalibration is None and model.recalibration is not None:
        results = made.results
        made = made._with_recalibration(model.recalibration)
        made.results = results
    warn_of_a_poor_fit(made.results, None)
    return made


def _settings(
    dataset: Dataset, checkpoint: Checkpoint, chosen: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns all settings: the caller's, those of the checkpoint, and those that fit the rows."""
    carried = checkpoint.saved_flags({*CARRIED} & {*SETTINGS, *OF_CONTINUING})
    mode = chosen.get("continue_lr", REWARM)
    schedule = chosen.get("schedule", carried.get("schedule", "nvidia"))
    if mode == REWARM or schedule != "nvidia":
        for name in OF_NVIDIA:
            carried.pop(name, None)
    if "set_aside" in carried and not set_aside_default(dataset.rows):
        carried["set_aside"] = 0.0
    given = {**carried, "epochs": 1, **chosen, "continue_lr": mode}
    rows = round((1 - given.get("set_aside", 0.0)) * dataset.rows["train"])
    return training_defaults(rows, given)


def dataset_of_frames(model: Predictor, frames: Mapping[str, Any]) -> Dataset:
    """Returns a temporary dataset of tables, whose dictionaries extend those of a model.

    Args:
        frames: tables of splits, in the order of their rows; None is a split without rows.

    Raises:
        ValueError: a column is missing, a value is unreadable, or the model's transform keeps a
            sample of the rows; the message has the details.
    """
    transform = model.row_transform
    if transform.keep_negatives < 1:
        raise ValueError(
            f"{model.path}: was trained on {transform.keep_negatives:g} of the rows with label 0; "
            "prepare the rows with dlrm prepare, which samples them, and update with the dataset"
        )
    others: dict[str, Any] = {split: frames.get(split) for split in ("test", "validation")}
    if all(frame is None for frame in others.values()):
        others["test_fraction"] = 0.0
    return Dataset.from_arrow(
        frames["train"],
        transform.schema,
        extend=str(model.path),
        output_ordering="input",
        **others,
    )
