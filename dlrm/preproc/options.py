"""Options that preparation of all kinds of rows has."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrm.settings import check_settings, setting

if TYPE_CHECKING:
    from dlrm.data.schema.schema import Schema, TimeField

OUTPUT_FORMATS = ("split_binary", "binary")
PARQUET_VALUES = ("decoded", "ids")  # of a dataset that is converted to Parquet
ORDERINGS = ("total_random", "input")
NUMERICS = ("keep", "refit")
# Rows of a dataset at a URI are not fetched.
_FILES = "read, *.json, *.npy"
BAD_LINES = ("fail", "quarantine")
_END = (1 << 63) - 1  # of time
_LEAST_MEMORY = 128_000_000
_STAGES = 6  # version of the results of tasks, for runs to resume


@dataclass(frozen=True)
class IncrementConfig:
    """The dictionaries that rows extend; field names are those of the flags."""

    extend: Path | None = setting(
        None,
        "dataset or checkpoint whose dictionaries to extend: ids stay as they are, and values that "
        "reach their frequency limit within these rows get the next ones",
        uri=_FILES,
    )
    numerics: str = setting(
        "keep",
        "--extend: keep bins and means, or refit them to these rows, which changes the meaning of "
        "numbers",
        choices=NUMERICS,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.extend is None and self.numerics != type(self).numerics:
            raise ValueError("--numerics: expected --extend too, got none")


@dataclass(frozen=True, kw_only=True)
class PreparationOptions:
    """Options of preparation. All except `split_bytes` and `max_bad_lines` change the output.

    Field names are those of the flags.

    Attributes:
        increment: the dictionaries that the rows extend.
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
        return facts | ({"--numerics": self.increment.numerics} if self.increment.extend else {})


@dataclass(frozen=True)
class RunConfig:
    """A run of preparation; field names are those of the flags."""

    cores: int | None = setting(
        None, "number of cores to use; default: all of this machine", least=1
    )
    memory: str | None = setting(
        None,
        "memory for sums and sorting, such as 4GB; what it does not hold goes to the disk; "
        "default: half of what is free",
    )
    restart: bool = setting(False, "discard an unfinished run and start again")

    def __post_init__(self) -> None:
        _ = self.memory_bytes

    @property
    def memory_bytes(self) -> int | None:
        """Returns the bytes of memory for sums and sorting; None for a share of what is free."""
        if self.memory is None:
            return None
        found = re.fullmatch(r"(\d+(?:\.\d+)?) *(K|M|G|T)i?B?", self.memory.strip(), re.IGNORECASE)
        size = int(float(found[1]) * 1000 ** (1 + "KMGT".index(found[2].upper()))) if found else 0
        if size < _LEAST_MEMORY:
            raise ValueError(
                f"--memory: expected a size of 128MB or more, such as 4GB, got {self.memory!r}"
            )
        return size

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
    from dlrm.data.schema.schema import TimeField
    from dlrm.data.transform.times import microseconds

    zone = TimeField(field.column, field.zone or "UTC")
    try:
        return microseconds(text, zone)
    except ValueError:
        raise ValueError(
            f"--{flag}: expected a time such as 2026-11-20 or 2026-11-20T08:00:00+00:00, got "
            f"{text!r}"
        ) from None
