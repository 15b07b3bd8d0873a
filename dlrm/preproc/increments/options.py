"""Options of a day that extends dictionaries, or begins a chain of days."""

from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from dlrm.settings import check_settings, setting

NUMERICS = ("keep", "refit")
# Rows of a dataset at a URI are not fetched.
_FILES = "read, *.json, *.npy, hashes_*, ids_*, directory_*"


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
        "number or date (2026-11-20) of the rows' day, which begins a chain of days; with --extend "
        "it is later than that dataset's, by default the next",
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
            for name in ("candidates", "half_life", "numerics"):
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
        names = ("day", "candidates", "half_life", "numerics")
        return {f"--{name}": getattr(self, name) for name in names}


def is_date(day: str) -> bool:
    """Returns whether a day is a date, and no number."""
    return not day.isdecimal()


def day_number(day: str) -> int:
    """Returns the number of a day, by which days are compared.

    Raises:
        ValueError: it is neither a number nor a date.
    """
    try:
        return date.fromisoformat(day).toordinal() if is_date(day) else _checked(int(day))
    except ValueError:
        raise ValueError(
            f"--day {day}: expected a number such as 7, up to {_MOST}, or a date such as 2026-11-20"
        ) from None


_MOST = 1 << 30


def _checked(number: int) -> int:
    if number > _MOST:
        raise ValueError
    return number


def next_day(day: str) -> str:
    """Returns the day after another."""
    if is_date(day):
        return (date.fromisoformat(day) + timedelta(1)).isoformat()
    return str(int(day) + 1)
