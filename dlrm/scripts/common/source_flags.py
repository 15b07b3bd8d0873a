"""Flags of commands that score rows: a model, and the sources that `dlrm.serving.sources` reads."""

from dataclasses import dataclass

from dlrm.data.sources.text_format import TextFormat
from dlrm.flags import ConfigFlags
from dlrm.scripts.common.table_flags import TEXT_FLAGS
from dlrm.serving.rows.config import SourceConfig
from dlrm.settings import REQUIRED, same_setting, setting
from dlrm.tasks.config import ClickCheckpointConfig

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
