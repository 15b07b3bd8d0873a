"""Options that preparation of all kinds of rows has."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm.settings import check_settings, setting

if TYPE_CHECKING:
    from dlrm.data.transform.schema import Schema, TimeField

OUTPUT_FORMATS = ("split_binary", "binary")
PARQUET_VALUES = ("decoded", "ids")  # of a dataset that is converted to Parquet
ORDERINGS = ("total_random", "input")
NUMERICS = ("keep", "refit")
# Rows of a dataset at a URI are not fetched.
_FILES = "read, *.json, *.npy, hashes_*, ids_*, directory_*"
BAD_LINES = ("fail", "quarantine")
_END = (1 << 63) - 1  # of time
_STAGES = 4  # version of the results of tasks, for runs to resume


@dataclass(frozen=True)
class IncrementConfig:
    """A day of rows, and the dictionaries that it extends; field names are those of the flags."""

    extend: Path | None = setting(
        None,
        "dataset or checkpoint whose dictionaries to extend: ids stay as they are, and values that "
        "reach their frequency limit get the next ones",
        uri=_FILES,
    )
    day: str | None = setting(
        None,
        "number, date (2026-11-20) or hour (2026-11-20T13) of the rows, which begins a chain of "
        "days; with --extend it is later than that dataset's, by default the next",
    )
    candidates: int = setting(
        1 << 28,
        "bytes for the counts of values below their frequency limit, which are kept for later days",
        least=0,
    )
    half_life: float | None = setting(
        None,
        "days after which the count of a value below its frequency limit has halved; default: "
        "counts stay as they are",
        above=0,
    )
    admission_probability: float = setting(
        0.0,
        "chance that a value below its frequency limit gets an id on a day that has it",
        least=0,
        most=1,
    )
    numerics: str = setting(
        "keep",
        "--extend: keep bins, means and encodings, or refit them to the day's rows, which changes "
        "the meaning of numbers",
        choices=NUMERICS,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.day is not None:
            day_number(self.day)
        if not self.is_used:
            for name in _OF_DAYS:
                if getattr(self, name) != getattr(type(self), name):
                    raise ValueError(f"--{name}: expected --extend or --day too, got neither")

    @property
    def is_used(self) -> bool:
        """Returns whether the rows are a day of a chain."""
        return self.extend is not None or self.day is not None

    def facts(self) -> dict[str, Any]:
        """Returns, by flag, the options that determine the bytes; none outside of chains."""
        if not self.is_used:
            return {}
        return {f"--{name}": getattr(self, name) for name in ("day", *_OF_DAYS)}


_OF_DAYS = ("candidates", "half_life", "admission_probability", "numerics")
_MOST = 1 << 30
_HOUR = "%Y-%m-%dT%H"


def kind_of_day(day: str) -> str:
    """Returns what a day is: a number, a date or an hour."""
    if day.isdecimal():
        return "number"
    return "hour" if "T" in day else "date"


def day_number(day: str) -> int:
    """Returns the number of a day, by which days of one kind are compared.

    Raises:
        ValueError: it is neither a number nor a date nor an hour.
    """
    try:
        number = _PARSED[kind_of_day(day)](day)
        if number <= _MOST:
            return number
    except ValueError:
        pass
    raise ValueError(
        f"--day {day}: expected a number such as 7, up to {_MOST}, a date such as 2026-11-20 or an "
        "hour such as 2026-11-20T13"
    )


def _hour_number(day: str) -> int:
    hour = datetime.strptime(day, _HOUR)
    return hour.toordinal() * 24 + hour.hour


_PARSED: dict[str, Callable[[str], int]] = {
    "number": int,
    "date": lambda day: date.fromisoformat(day).toordinal(),
    "hour": _hour_number,
}


def next_day(day: str) -> str:
    """Returns the day after another, of its kind."""
    if (kind := kind_of_day(day)) == "hour":
        return (datetime.strptime(day, _HOUR) + timedelta(hours=1)).strftime(_HOUR)
    if kind == "date":
        return (date.fromisoformat(day) + timedelta(1)).isoformat()
    return str(int(day) + 1)


@dataclass(frozen=True, kw_only=True)
class PreparationOptions:
    """Options of preparation. All except `split_bytes` and `max_bad_lines` change the output.

    Field names are those of the flags.

    Attributes:
        increment: the place of the rows in a chain of days.
    """

    output_ordering: str = setting("total_random", "order of the training rows", choices=ORDERINGS)
    split_bytes: int | None = setting(
        None, "bytes of input that one task reads; does not change the result", least=1
    )
    output_format: str = setting(
        "split_binary",
        "split_binary: one file per feature; binary: NVIDIA's rows of 4-byte words",
        choices=OUTPUT_FORMATS,
    )
    bad_lines: str = setting(
        "fail",
        "fail: an unreadable row ends the run; quarantine: it is left out and listed in "
        "quarantine/",
        choices=BAD_LINES,
    )
    max_bad_lines: float = setting(
        0.001, "maximum share of rows that quarantine may leave out", least=0, most=1
    )
    report: bool = setting(True, "write report.html and report.json")
    increment: IncrementConfig = IncrementConfig()

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def quarantine(self) -> bool:
        """Returns whether unreadable rows are left out."""
        return self.bad_lines == "quarantine"

    def common_facts(self) -> dict[str, Any]:
        """Returns, by flag, the common options that determine the bytes of the dataset."""
        names = ("output_ordering", "output_format", "bad_lines", "report")
        facts = {f"--{name}": getattr(self, name) for name in names} | {"stages": _STAGES}
        return facts | self.increment.facts()


@dataclass(frozen=True)
class RunConfig:
    """A run of preparation; field names are those of the flags."""

    cores: int | None = setting(
        None, "number of cores to use; default: all of this machine", least=1
    )
    restart: bool = setting(False, "discard an unfinished run and start again")

    @property
    def num_cores(self) -> int:
        """Returns the number of cores to use."""
        return self.cores or os.cpu_count() or 1


@dataclass(frozen=True)
class SplitConfig:
    """Says how rows are divided; fields are flag names.

    At most one of the ways is chosen: by time, by a column, by files, or by chance, which is by
    `test_fraction` and `validation_fraction`.

    `test_fraction` and `validation_fraction` select by a hash of the row's number, or of its value
    of `split_key`.
    """

    test_fraction: float = setting(
        0.0, "share of the rows to choose at random as test rows", least=0, below=1
    )
    validation_fraction: float = setting(
        0.0, "share of the rows to choose at random for validation", least=0, below=1
    )
    split_key: str | None = setting(
        None, "column whose equal values all go to one split, such as the user"
    )
    test_from: str | None = setting(None, "time, in ISO 8601, from which on rows are test rows")
    validation_from: str | None = setting(
        None, "time, in ISO 8601, from which on rows are validation rows"
    )
    split_column: str | None = setting(None, "column with the values train, test or validation")
    keep_negatives: float = setting(
        1.0, "share of the training rows with label 0 to keep", above=0, most=1
    )
    seed: int = setting(0, "seed of random choices and of the order of training rows")

    def __post_init__(self) -> None:
        check_settings(self)
        if self.test_fraction + self.validation_fraction >= 1:
            raise ValueError(
                f"--test_fraction {self.test_fraction}, --validation_fraction "
                f"{self.validation_fraction}: expected less than 1 together"
            )
        ways = [name for name in _WAYS if getattr(self, name)]
        if len({_WAYS[name] for name in ways}) > 1:
            raise ValueError(
                f"--{ways[0]}, --{ways[-1]}: expected one way to divide the rows, got both"
            )
        if self.validation_from and not self.test_from:
            raise ValueError("--validation_from: expected --test_from too, got none")
        if self.split_key and not (self.test_fraction or self.validation_fraction):
            raise ValueError("--split_key: expected --test_fraction too, got none")

    def times(self, schema: "Schema") -> tuple[int, int] | None:
        """Returns the beginnings of test and validation, in microseconds since 1970.

        Raises:
            ValueError: they are not times, are in the wrong order, or the schema has no time.
        """
        if not self.test_from:
            return None
        if schema.time is None:
            raise ValueError("--test_from: expected a schema with a time, got one without")
        begins = [_microseconds("test_from", self.test_from, schema.time), _END]
        if self.validation_from:
            begins[1] = _microseconds("validation_from", self.validation_from, schema.time)
        if begins[1] <= begins[0]:
            raise ValueError(
                f"--validation_from {self.validation_from}: expected a time after --test_from "
                f"{self.test_from}"
            )
        return begins[0], begins[1]


_WAYS = {
    **dict.fromkeys(("test_fraction", "validation_fraction", "split_key"), "chance"),
    **dict.fromkeys(("test_from", "validation_from"), "time"),
    "split_column": "column",
}


def _microseconds(flag: str, text: str, field: "TimeField") -> int:
    from dlrm.data.tables.times import microseconds
    from dlrm.data.transform.schema import TimeField

    zone = TimeField(field.column, field.zone or "UTC")
    try:
        return microseconds(text, zone)
    except ValueError:
        raise ValueError(
            f"--{flag}: expected a time such as 2026-11-20 or 2026-11-20T08:00:00+00:00, got "
            f"{text!r}"
        ) from None
