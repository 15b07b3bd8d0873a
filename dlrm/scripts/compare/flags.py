"""The flags of `dlrm.scripts.compare`."""

from dataclasses import dataclass
from pathlib import Path

from dlrm.settings import REQUIRED, setting


@dataclass(frozen=True)
class CompareConfig:
    """The runs, and where they are shown; field names are those of the flags."""

    runs: tuple[Path, ...] = setting(
        REQUIRED, "runs, or a directory of runs", positional=True, uri="read, *.json"
    )
    sort: str | None = setting(None, "metric or flag to sort by, best first")
    output: Path | None = setting(
        None,
        "directory to write the page and the JSON to; an earlier one is replaced",
        uri="replace, plain, comparison",
    )
