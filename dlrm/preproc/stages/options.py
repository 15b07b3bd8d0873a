"""Options that preparation of all kinds of rows has."""

from dataclasses import dataclass
from typing import Any

from dlrm.preproc.stages.dataset_files import OUTPUT_FORMATS

ORDERINGS = ("total_random", "input")
BAD_LINES = ("fail", "quarantine")
_STAGES = 2  # version of the results of tasks, for runs to resume


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of preparation. All except `split_bytes` and `max_bad_lines` change the output.

    Attributes:
        output_ordering: "total_random" shuffles the training rows, "input" keeps their order.
        split_bytes: size on disk of a task's input.
        output_format: format of the dataset.
        bad_lines: "fail", or "quarantine": leave out unreadable rows, and list them.
        max_bad_lines: maximum share of all rows to leave out.
        report: write `report.html` and `report.json`.
    """

    output_ordering: str = "total_random"
    split_bytes: int | None = None
    output_format: str = "split_binary"
    bad_lines: str = "fail"
    max_bad_lines: float = 0.001
    report: bool = True

    def __post_init__(self) -> None:
        for name, allowed in (
            ("output_ordering", ORDERINGS),
            ("output_format", OUTPUT_FORMATS),
            ("bad_lines", BAD_LINES),
        ):
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"--{name} {value}: expected one of {', '.join(allowed)}")
        if self.split_bytes is not None and self.split_bytes < 1:
            raise ValueError(f"--split_bytes {self.split_bytes}: expected 1 or more")
        if not 0 <= self.max_bad_lines <= 1:
            raise ValueError(f"--max_bad_lines {self.max_bad_lines}: expected a share, 0 to 1")

    @property
    def quarantine(self) -> bool:
        """Returns whether unreadable rows are left out."""
        return self.bad_lines == "quarantine"

    def common_facts(self) -> dict[str, Any]:
        """Returns, by flag, the common options that determine the bytes of the dataset."""
        names = ("output_ordering", "output_format", "bad_lines", "report")
        return {f"--{name}": getattr(self, name) for name in names} | {"stages": _STAGES}
