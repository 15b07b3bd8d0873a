"""The model and the rows of commands that score rows, by the flags of `source_flags`."""

from pathlib import Path
from typing import TYPE_CHECKING

from dlrm.command_line import importing, say
from dlrm.data import layout
from dlrm.data.transform.difference import compare_transforms
from dlrm.flags import Values
from dlrm.scripts.common.source_flags import CSV_FLAGS
from dlrm.scripts.common.table_flags import text_format
from dlrm.serving.rows.config import SourceConfig
from dlrm.serving.scoring import Scoring

if TYPE_CHECKING:
    from dlrm.serving.predictor import Predictor


def open_predictor(checkpoint: str, source: str | None, values: Values) -> "Predictor":
    """Loads a model; a dataset to score must have the model's transform."""
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
        note = compare_transforms(
            fitted, scored, allowed, allow_links=allow_links, source_kind=kind
        )
        if note:
            say(note)
    return predictor


def source_config(predictor: Scoring, values: Values) -> SourceConfig:
    """Returns the configuration of a model's rows that the flags describe.

    Raises:
        ValueError: a flag is for models of tables, and the model is none.
    """
    of_tables = predictor.transform is not None and not predictor.transform.is_log
    if not of_tables and (given := [name for name in CSV_FLAGS if name in values.given]):
        raise ValueError(f"--{given[0]}: is for models of tables; {predictor.path} is none")
    return values.config(SourceConfig, text=text_format(values))
