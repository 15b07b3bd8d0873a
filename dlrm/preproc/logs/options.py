"""Options of preprocessing raw logs."""

from dataclasses import asdict, dataclass
from typing import Any

from dlrm.data.sources.log_lines import LogFormat
from dlrm.data.transform.dictionaries import FrequencyLimit
from dlrm.data.transform.numeric_transforms import CRITEO_TRANSFORMS
from dlrm.preproc.stages.stage import BAD_LINES, ORDERINGS
from dlrm.preproc.stages.tasks import OUTPUT_FORMATS

HALVES = ("all", "first", "second")


@dataclass(frozen=True)
class Options:
    """Options of preprocessing logs; all but `split_bytes` and `max_bad_lines` change the output.

    Attributes:
        dictionary_days: first and last day whose values get ids; None is all.
        bad_lines: "fail", or "quarantine": leave out unreadable lines, and list them.
        max_bad_lines: maximum share of all lines to leave out.
        report: whether to write `report.html` and `report.json`.
    """

    log_format: LogFormat = LogFormat()
    frequency_limit: str = "15"
    numeric_transform: str = "readme"
    output_ordering: str = "total_random"
    dictionary_days: tuple[int, int] | None = None
    seed: int = 0
    split_bytes: int | None = None
    output_format: str = "split_binary"
    bad_lines: str = "fail"
    max_bad_lines: float = 0.001
    report: bool = True

    def __post_init__(self) -> None:
        for name, allowed in (
            ("numeric_transform", tuple(CRITEO_TRANSFORMS)),
            ("output_ordering", ORDERINGS),
            ("output_format", OUTPUT_FORMATS),
            ("bad_lines", BAD_LINES),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"--{name} {getattr(self, name)}: expected one of {allowed}")
        if self.split_bytes is not None and self.split_bytes < 1:
            raise ValueError(f"--split_bytes {self.split_bytes}: expected 1 or more")
        if not 0 <= self.max_bad_lines <= 1:
            raise ValueError(f"--max_bad_lines {self.max_bad_lines}: expected a share, 0 to 1")
        self.parse_limit()

    def parse_limit(self) -> FrequencyLimit:
        """Returns the limits of columns in `frequency_limit`.

        Raises:
            ValueError: it is not a limit, or has one for a column that is not categorical.
        """
        shape = self.log_format
        return FrequencyLimit.parse(
            self.frequency_limit, shape.num_numerical, shape.num_categorical
        )

    @property
    def quarantine(self) -> bool:
        """Returns whether unreadable lines are left out."""
        return self.bad_lines == "quarantine"

    def facts(self) -> dict[str, Any]:
        """Returns, by flag, the options that determine the bytes of the output."""
        values = asdict(self)
        shape = values.pop("log_format")
        del values["split_bytes"], values["max_bad_lines"]
        return {f"--{name}": value for name, value in (shape | values).items()}

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
