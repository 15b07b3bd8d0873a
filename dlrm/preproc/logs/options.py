"""Options of preparing raw logs."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dlrm.data import names as dataset_names
from dlrm.data.choices import CRITEO_TRANSFORMS, described
from dlrm.data.sources.text_format import LogFormat
from dlrm.preproc.options import PreparationOptions, SplitConfig
from dlrm.preproc.spark.session import ENGINES
from dlrm.settings import setting

if TYPE_CHECKING:
    from dlrm.data.schema.schema import Schema

HALVES = ("all", "first", "second")
DATASET = "binary_dataset"
KAGGLE_DAYS = 7
_NO_SHUFFLE = "the number of shuffled parts follows from the cores, and nothing is joined"
UNUSED = {  # NVIDIA's flags
    "low_mem": "memory is bounded in any case",
    "dict_build_shuffle_parallel_per_day": _NO_SHUFFLE,
    "apply_shuffle_parallel_per_day": _NO_SHUFFLE,
    "skew_broadcast_pct": _NO_SHUFFLE,
}
MODES = ("verify", "prepare", "generate_models", "transform")


@dataclass(frozen=True)
class LogOptions(PreparationOptions):
    """Options of preparing logs, besides those of all rows.

    Attributes:
        log_format: the columns of a line.
        dictionary_days: first and last day whose values get ids; None is all.
    """

    feature_spec_out: ClassVar[str] = dataset_names.FEATURE_SPEC
    log_format: LogFormat = LogFormat()
    frequency_limit: str = setting(
        "15",
        "number of rows that a value must occur in to get an id: N, or COLUMN:N, comma-separated; "
        "the first categorical column is 1 + num_numerical",
    )
    numeric_transform: str = setting(
        "readme", described(CRITEO_TRANSFORMS), choices=CRITEO_TRANSFORMS
    )
    dictionary_days: tuple[int, int] | None = None
    seed: int = setting(0, "seed of --output_ordering total_random")
    hold_out: bool = setting(
        True, "hold out the last day, half for testing and half for validation; not for training"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.schema  # whose limits are checked

    @property
    def schema(self) -> "Schema":
        """Returns the schema of logs with these options.

        Raises:
            ValueError: the frequency limit is none, or is one of a column that is not categorical.
        """
        from dlrm.data.schema.logs import log_schema
        from dlrm.data.transform.dictionaries import frequency_limits

        shape = self.log_format
        numbers = shape.num_numerical, shape.num_categorical
        limits = frequency_limits(self.frequency_limit, *numbers)
        return log_schema(numbers[0], limits, self.numeric_transform)

    @property
    def feature_names(self) -> tuple[str, list[str], list[str]]:
        """Returns the names of the label, numerical and categorical features in a specification."""
        shape = self.log_format
        return dataset_names.default_names(shape.num_numerical, shape.num_categorical)

    @property
    def division(self) -> SplitConfig:
        """Returns no division: days and halves of the last day are the splits."""
        return SplitConfig(seed=self.seed)

    def facts(self) -> dict[str, Any]:
        """Returns, by flag, the options that determine the bytes of the dataset."""
        names = ["frequency_limit", "numeric_transform", "dictionary_days", "seed"]
        names += ["hold_out"] * (not self.hold_out)
        values = asdict(self.log_format) | {name: getattr(self, name) for name in names}
        return {f"--{name}": value for name, value in values.items()} | self.common_facts()

    def manifest_facts(self) -> dict[str, Any]:
        """Returns the manifest's entries about the transform."""
        names = ["numeric_transform", "frequency_limit", "dictionary_days", "output_ordering"]
        names += ["seed", "output_format", "bad_lines"]
        days = self.dictionary_days and "{}-{}".format(*self.dictionary_days)
        return {name: getattr(self, name) for name in names} | {"dictionary_days": days}


@dataclass(frozen=True)
class LogsConfig:
    """A task, its files, and NVIDIA's other flags; field names are those of the flags."""

    mode: str = setting("prepare", "task to perform", choices=MODES)
    input_folder: Path | None = setting(
        None, "directory of day_0, day_1, ..., or of train.txt", uri="read"
    )
    input_file: Path | None = setting(
        None, "generate_models, transform: one file instead of days", uri="read"
    )
    output_folder: Path | None = setting(
        None, f"prepare: directory in which to write {DATASET}/", uri="write"
    )
    model_folder: Path | None = setting(
        None, "generate_models, transform: directory of the fitted transform"
    )
    num_days: int | None = setting(
        None,
        "expected number of day files (default: any), or number of days into which train.txt is "
        f"cut (default {KAGGLE_DAYS})",
    )
    days: str | None = setting(
        None,
        "generate_models, transform: days A to B, both included, as A-B; default: all",
    )
    half: str = setting("all", "transform: rows to write: all, or one half of them", choices=HALVES)
    unlabeled: bool = setting(False, "transform: the lines have no label")
    write_mode: str = setting(
        "overwrite",
        "overwrite: replace earlier output once the new one is complete; errorifexists: refuse",
        choices=("overwrite", "errorifexists"),
    )
    dictionary_days: str | None = setting(
        None, "days to fit on, as A-B; default: all, including the last"
    )
    engine: str = setting(
        "spark",
        "spark: Spark; local: processes of this machine, without Java. Both write the same bytes",
        choices=ENGINES,
    )
    debug_mode: bool = setting(False, "show the traceback of an error")
    model_size_file: Path | None = setting(
        None, "transform: file to write the greatest ids to, in the form of model_size.json"
    )
    output_partitioning: str | None = setting(
        None, "rows are not divided by day", choices=("none",)
    )
    low_mem: bool = setting(False, f"unused: {UNUSED['low_mem']}")
    dict_build_shuffle_parallel_per_day: float | None = setting(None, f"unused: {_NO_SHUFFLE}")
    apply_shuffle_parallel_per_day: float | None = setting(None, f"unused: {_NO_SHUFFLE}")
    skew_broadcast_pct: float | None = setting(None, f"unused: {_NO_SHUFFLE}")
    no_numeric_log_col: bool = setting(False, "refused")
