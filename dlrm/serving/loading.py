"""Opens a model's directory: network, transform and recalibration of a checkpoint."""

import os
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

from dlrm.data import layout
from dlrm.data.transform.difference import compare_transforms
from dlrm.data.transform.transform import Transform
from dlrm.locks import ReplacedError, unreplaced
from dlrm.manifest import check_listed
from dlrm.model.config import DLRMConfig
from dlrm.model.dlrm import DLRM
from dlrm.remote.localize import errors_shown, local_path
from dlrm.serving.network.recalibration import load_recalibration
from dlrm.serving.predictor import Predictor
from dlrm.serving.sources import check_features
from dlrm.torch_settings import own_settings
from dlrm.train.checkpoints.checkpoint import Checkpoint
from dlrm.train.checkpoints.state import Parameters
from dlrm.train.checkpoints.writer import CONFIG

# Fields of `DLRMConfig` for each categorical field, by their names under "dataset".
_OF_FIELDS = {
    "table_poolings": "poolings",
    "field_tables": "field tables",
    "field_targets": "targets",
}
_ATTEMPTS = 100  # to load a checkpoint that is being replaced again and again


def load(
    checkpoint: str | os.PathLike,
    dataset: str | os.PathLike | None = None,
    allow_other_transform: bool = False,
    say: Callable[[str], object] = warnings.warn,
    allow_links: bool = False,
) -> Predictor:
    """Loads a trained model to score rows with.

    Args:
        checkpoint: a checkpoint, or a run's directory of checkpoints, whose best one is used; or
            the URI of one.
        dataset: dataset, or its URI, whose fitted transform to apply to raw rows if the checkpoint
            has none. A checkpoint trained on one of our datasets has its transform, and both must
            be the same.
        allow_other_transform: whether to accept different transforms, and use the checkpoint's.
        say: called with a line if they differ, or if the dataset has none.
        allow_links: whether the dataset's files may be symbolic links out of it.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: it is damaged, or the dataset's transform differs; the message names up to three
            differing fields.
    """
    with errors_shown():
        path = local_path(checkpoint, "checkpoint")
        rows = local_path(dataset, "dataset") if dataset else None
        for _ in range(_ATTEMPTS):
            with (
                suppress(ReplacedError),
                Checkpoint.held(path) as held,
                unreplaced(held.path),
                own_settings(),
            ):
                note = rows and compare_transforms(
                    held.path, Path(rows), allow_other_transform, allow_links=allow_links
                )
                model = load_model(held.path)
                transform = load_transform(held.path, model.config, rows)
                recalibration = load_recalibration(held.path)
                break
        else:
            raise ReplacedError(f"{path}: replaced {_ATTEMPTS} times while it was read")
        if note:
            say(note)
    weakref.finalize(model, str, path)  # keeps the copy; recalibrated models share the network
    return Predictor(model, transform, held.path, recalibration=recalibration)


def load_model(path: Path, device: str = "cpu") -> DLRM:
    """Makes the network that a checkpoint describes, and loads the weights."""
    model = DLRM(model_config(path)).to(device).eval()
    Checkpoint(path).load(Parameters(model, model.table_parameters()).averaged())
    return model


def model_config(path: Path) -> DLRMConfig:
    """Reads the architecture from a checkpoint.

    Raises:
        ValueError: the checkpoint does not describe it.
    """
    checkpoint, first = Checkpoint(path), "bottom_mlp.0.weight"
    try:
        flags, data = checkpoint.config["flags"], checkpoint.config["dataset"]
        names = {field.name for field in fields(DLRMConfig)} & flags.keys()
        values = {name: flags[name] for name in names}
        values |= {name: data.get(said) for name, said in _OF_FIELDS.items()}
        values["table_sizes"] = data["table sizes"]
        if (weight := checkpoint.dense[first]).ndim != 2:
            raise ValueError(f"{first}: expected a matrix, got {[*weight.shape]}")
        values["num_numerical_features"] = weight.shape[1]
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return DLRMConfig(**(values | lists))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path / CONFIG}: not of a DLRM ({error!r})") from error
    except ValueError as error:
        raise ValueError(f"{path / CONFIG}: {str(error).removeprefix('--')}") from error


def load_transform(
    path: Path, config: DLRMConfig, dataset: str | os.PathLike | None = None
) -> Transform | None:
    """Returns the transform of a checkpoint, or else of a dataset; None if neither has one.

    Raises:
        ValueError: it does not match the model, or is damaged.
    """
    sources = [path, *([Path(dataset)] if dataset else [])]
    source = next((folder for folder in sources if (folder / layout.TRANSFORM).is_dir()), None)
    if source is None:
        return None
    check_listed(source, layout.TRANSFORM)
    transform = Transform.load(source / layout.TRANSFORM)
    transform.check_all()
    what = f"{source}: the transform"
    check_features(what, transform.num_numerical, transform.cardinalities, config)
    return transform
