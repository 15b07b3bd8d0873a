"""The results of the doctor's checks, and the report of them."""

import shutil
import textwrap
from dataclasses import asdict, dataclass
from typing import Any

OK, NOTE, ABSENT, SLOW, BROKEN = "ok", "note", "absent", "slow", "broken"
MEANINGS = {
    OK: "as it should be",
    NOTE: "worth knowing",
    ABSENT: "not installed; only the parts that it names need it",
    SLOW: "works, but costs time",
    BROKEN: "training cannot run",
}


@dataclass(frozen=True)
class Result:
    """Finding of a check about one part of the installation.

    Attributes:
        name: name of the part.
        state: a key of `MEANINGS`.
        value: its value on this machine.
        cost: the resulting loss, if any.
        fix: the command that fixes it, if there is one.
    """

    name: str
    state: str
    value: str
    cost: str = ""
    fix: str = ""

    def for_json(self) -> dict[str, Any]:
        """Returns the fields by the names that `--json` gives them."""
        fields = asdict(self)
        return fields | {"mend": fields.pop("fix")}


def report(results: list[Result], works: bool) -> str:
    """Returns the results as text."""
    width = max(min(shutil.get_terminal_size((100, 24)).columns, 120), 60)
    lines = []
    for found in results:
        lines += _wrapped(f"{found.state:<7} {found.name:<17} ", found.value, width)
        if found.cost:
            lines += _wrapped(f"{'':<25} costs: ", found.cost, width)
        if found.fix:
            lines.append(f"{'':<25} fix:   {found.fix}")  # not wrapped, for copying
    used = [state for state in MEANINGS if any(found.state == state for found in results)]
    lines += ["", *(f"{state:<7} {MEANINGS[state]}" for state in used), ""]
    if works:
        lines.append("Training works here.")
    else:
        lines.append('Training does NOT work here: fix what is marked "broken" first.')
    return "\n".join(lines)


def _wrapped(head: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
    ) or [head.rstrip()]


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message."""
    return (str(error).splitlines() or [""])[0]
