"""Options of preparing raw logs."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dlrm.data.choices import CRITEO_TRANSFORMS, described
from dlrm.data.clicks import names as dataset_names
from dlrm.data.sources.text_format import LogFormat
from dlrm.preproc.stages.options import Options, SplitConfig
from dlrm.settings import setting

if TYPE_CHECKING:
    from dlrm.data.transform.schema import Schema

HALVES = ("all", "first", "second")


@dataclass(frozen=True)
class LogOptions(Options):
    """Options of preparing logs, besides those of all rows.

    Attributes:
        log_format: the columns of a line.
        dictionary_days: first and last day whose values get ids; None is all.
    """

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

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.schema  # whose limits are checked

    @property
    def schema(self) -> "Schema":
        """Returns the schema of logs with these options.

        Raises:
            ValueError: the frequency limit is none, or is one of a column that is not categorical.
        """
        from dlrm.data.transform.dictionaries import FrequencyLimit
        from dlrm.data.transform.logs import log_schema

        shape = self.log_format
        numbers = shape.num_numerical, shape.num_categorical
        limit = FrequencyLimit.parse(self.frequency_limit, *numbers)
        return log_schema(numbers[0], limit.each(numbers[1]), self.numeric_transform)

    @property
    def remembered_schema(self) -> "Schema":
        """Returns the schema, which later readers know."""
        return self.schema

    @property
    def feature_spec_out(self) -> str:
        """Returns the name of the specification to write."""
        return dataset_names.FEATURE_SPEC

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
        names = ("frequency_limit", "numeric_transform", "dictionary_days", "seed")
        values = asdict(self.log_format) | {name: getattr(self, name) for name in names}
        return {f"--{name}": value for name, value in values.items()} | self.common_facts()

    def manifest_facts(self) -> dict[str, Any]:
        """Returns the manifest's entries about the transform."""
        return {
            "numeric_transform": self.numeric_transform,
            "frequency_limit": self.frequency_limit,
            "dictionary_days": self.dictionary_days and "{}-{}".format(*self.dictionary_days),
            "output_ordering": self.output_ordering,
            "seed": self.seed,
            "output_format": self.output_format,
            "bad_lines": self.bad_lines,
        }
