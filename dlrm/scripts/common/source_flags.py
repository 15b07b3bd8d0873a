"""Flags of commands that score rows: a model, and the sources that `dlrm.serving.sources` reads."""

from pathlib import Path

from absl import flags

from dlrm.command_line import say
from dlrm.data.clicks import layout
from dlrm.data.clicks.config import DataConfig
from dlrm.data.tables.files import KINDS
from dlrm.data.transform.difference import compare_transforms
from dlrm.data.verification import VERIFY_DATA
from dlrm.scripts.common import table_flags
from dlrm.scripts.common.table_flags import TEXT_FLAGS, define_format_flags, text_format
from dlrm.serving.loading import load
from dlrm.serving.predictor import BATCH_SIZE, Predictor
from dlrm.serving.sources import SourceConfig
from dlrm.settings import settings_of

FLAGS = flags.FLAGS
CSV_FLAGS = ("columns", "header", "input_format", *TEXT_FLAGS)
_SPLITS = ("test", "validation", "train")


def define_source_flags(dataset: str) -> None:
    """Defines the flags of a model and of the rows that it scores.

    Args:
        dataset: help of `--dataset`.
    """
    flags.DEFINE_string(
        "checkpoint",
        None,
        "Checkpoint, or directory of checkpoints, whose best one is used",
        required=True,
    )
    flags.DEFINE_boolean(
        "label",
        True,
        "The lines of a log begin with the label; the label of a table is read if it has one",
    )
    flags.DEFINE_string("dataset", None, dataset)
    flags.DEFINE_boolean(
        "allow_other_transform",
        False,
        "Accept a dataset whose fitted transform is not the checkpoint's, so that the same ids "
        "stand for other values",
    )
    flags.DEFINE_enum("split", "test", _SPLITS, "Split of the dataset to score")
    flags.DEFINE_enum(
        "verify_data", "first", list(VERIFY_DATA), settings_of(DataConfig)["verify_data"].help
    )
    flags.DEFINE_boolean("allow_links", False, settings_of(DataConfig)["allow_links"].help)
    flags.DEFINE_enum("dataset_type", "split", ["split", "binary"], "Type of the dataset")
    flags.DEFINE_integer("batch_size", BATCH_SIZE, "Number of rows scored at a time", lower_bound=1)
    flags.DEFINE_enum(
        "input_format", None, KINDS, "Format of the table; default: by the file's name"
    )
    flags.DEFINE_list(
        "columns",
        [],
        "Names of a CSV's columns; default: those of its header, otherwise those of the training "
        "data",
    )
    flags.DEFINE_boolean(
        "header",
        None,
        "A CSV begins with a line of column names; default: yes if its first row contains one of "
        "them",
    )
    define_format_flags()
    flags.adopt_module_key_flags(table_flags)  # for --help


def open_predictor(checkpoint: str, source: str | None) -> Predictor:
    """Loads a model; a dataset to score must have the model's transform."""
    config = SourceConfig(dataset_type=FLAGS.dataset_type)
    scored = source if source is not None and config.is_dataset(Path(source)) else None
    allowed = FLAGS.allow_other_transform
    predictor = load(checkpoint, FLAGS.dataset or scored, allowed, say, FLAGS.allow_links)
    predictor.batch_size = FLAGS.batch_size
    if FLAGS.dataset and scored and Path(FLAGS.dataset).resolve() != Path(scored).resolve():
        own = (predictor.path / layout.TRANSFORM).is_dir()
        fitted, kind = (predictor.path, "checkpoint") if own else (FLAGS.dataset, layout.KIND)
        note = compare_transforms(
            fitted, scored, allowed, allow_links=FLAGS.allow_links, source_kind=kind
        )
        if note:
            say(note)
    return predictor


def source_config(predictor: Predictor) -> SourceConfig:
    """Returns how the flags say to read rows for a model.

    Raises:
        ValueError: a flag is for models of tables, and the model is none.
    """
    of_tables = predictor.transform is not None and not predictor.transform.is_log
    if not of_tables and (given := [name for name in CSV_FLAGS if FLAGS[name].present]):
        raise ValueError(f"--{given[0]}: is for models of tables; {predictor.path} is none")
    return SourceConfig(
        FLAGS.label if FLAGS["label"].present else None,
        FLAGS.split,
        FLAGS.dataset_type,
        FLAGS.verify_data,
        FLAGS.allow_links,
        FLAGS.batch_size,
        FLAGS.input_format,
        text_format(),
    )
