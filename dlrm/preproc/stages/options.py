"""Options that preparation of all kinds of rows has."""

import os
from dataclasses import dataclass
from typing import Any

from dlrm.preproc.stages.dataset_files import OUTPUT_FORMATS
from dlrm.settings import check_settings, setting

ORDERINGS = ("total_random", "input")
BAD_LINES = ("fail", "quarantine")
_STAGES = 2  # version of the results of tasks, for runs to resume


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of preparation. All except `split_bytes` and `max_bad_lines` change the output.

    Field names are those of the flags.
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

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def quarantine(self) -> bool:
        """Returns whether unreadable rows are left out."""
        return self.bad_lines == "quarantine"

    def common_facts(self) -> dict[str, Any]:
        """Returns, by flag, the common options that determine the bytes of the dataset."""
        names = ("output_ordering", "output_format", "bad_lines", "report")
        return {f"--{name}": getattr(self, name) for name in names} | {"stages": _STAGES}


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
