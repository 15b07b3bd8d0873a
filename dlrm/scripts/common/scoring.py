"""The command line of commands that score rows, and the model and rows that it names."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dlrm.command_line import importing, say
from dlrm.data.sources.text_format import TextFormat
from dlrm.flags import ConfigFlags, Values
from dlrm.scripts.common.table_flags import TEXT_FLAGS, text_format
from dlrm.serving.rows.config import SourceConfig
from dlrm.settings import REQUIRED, same_setting, setting
from dlrm.tasks.config import ClickCheckpointConfig

if TYPE_CHECKING:
    from dlrm.serving.predictor import Predictor
    from dlrm.serving.scoring import Scorer

CSV_FLAGS = ("input_format", *TEXT_FLAGS)
_HELPS = {
    "columns": "Names of a CSV's columns; default: those of its header, otherwise those of the "
    "training data",
    "header": "A CSV begins with a line of column names; default: yes if its first row contains "
    "one of them",
}


@dataclass(frozen=True)
class ModelConfig:
    """The model that scores rows, and its transform; field names are those of the flags."""

    checkpoint: str = setting(
        REQUIRED, "Checkpoint, or directory of checkpoints, whose best one is used", uri="read"
    )
    dataset: str | None = setting(
        None, "Dataset whose fitted transform to apply if the checkpoint has none", uri="read"
    )
    allow_other_transform: bool = same_setting(ClickCheckpointConfig, "allow_other_transform")


def scoring_line(*configs: tuple[str, type], **helps: str) -> ConfigFlags:
    """Returns the command line of a command that scores rows.

    Args:
        helps: other texts of the help, by name.
    """
    own = [("Model", ModelConfig), ("Rows", SourceConfig), ("Rows", TextFormat)]
    return ConfigFlags([*configs, *own], helps={**_HELPS, **helps})


def open_predictor(checkpoint: str, source: str | None, values: Values) -> "Predictor":
    """Loads a model; a dataset to score must have the model's transform."""
    from dlrm.data import layout
    from dlrm.data.transform.difference import compare_transforms

    with importing():
        from dlrm.serving.loading import load

    config = SourceConfig(dataset_type=values["dataset_type"])
    scored = source if source is not None and config.is_dataset(Path(source)) else None
    allowed, allow_links = values["allow_other_transform"], values["allow_links"]
    dataset = values["dataset"]
    predictor = load(checkpoint, dataset or scored, allowed, say, allow_links)
    predictor.batch_size = values["batch_size"]
    if dataset and scored and Path(dataset).resolve() != Path(scored).resolve():
        own = (predictor.path / layout.TRANSFORM).is_dir()
        fitted, kind = (predictor.path, "checkpoint") if own else (dataset, layout.KIND)
        if note := compare_transforms(
            fitted, scored, allowed, allow_links=allow_links, source_kind=kind
        ):
            say(note)
    return predictor


def source_config(predictor: "Scorer", values: Values) -> SourceConfig:
    """Returns the configuration of a model's rows that the flags describe.

    Raises:
        ValueError: a flag is for models of tables, and the model is none.
    """
    of_tables = predictor.transform is not None and not predictor.transform.is_log
    if not of_tables and (given := [name for name in CSV_FLAGS if name in values.given]):
        raise ValueError(f"--{given[0]}: is for models of tables; {predictor.path} is none")
    return values.config(SourceConfig, text=text_format(values))
