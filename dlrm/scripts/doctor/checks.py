"""What the doctor found out about one thing, and the report of all of them."""

import shutil
import textwrap
from dataclasses import dataclass

OK, NOTE, ABSENT, SLOW, BROKEN = "ok", "note", "absent", "slow", "broken"
MEANINGS = {
    OK: "as it should be",
    NOTE: "worth knowing",
    ABSENT: "not here; only what is named needs it",
    SLOW: "works, but costs time",
    BROKEN: "training cannot run",
}


@dataclass(frozen=True)
class Finding:
    """What was found out about one thing.

    Attributes:
        name: the thing.
        state: a key of `MEANINGS`.
        value: what it is here.
        cost: what is lost by it, if anything.
        mend: the command that changes that, if there is one.
    """

    name: str
    state: str
    value: str
    cost: str = ""
    mend: str = ""


def report(findings: list[Finding], works: bool) -> str:
    """The findings as text."""
    width = max(min(shutil.get_terminal_size((100, 24)).columns, 120), 60)
    lines = []
    for found in findings:
        lines += _wrapped(f"{found.state:<7} {found.name:<17} ", found.value, width)
        if found.cost:
            lines += _wrapped(f"{'':<25} costs: ", found.cost, width)
        if found.mend:
            lines.append(f"{'':<25} mend:  {found.mend}")  # unbroken, to be copied
    used = [state for state in MEANINGS if any(found.state == state for found in findings)]
    lines += ["", *(f"{state:<7} {MEANINGS[state]}" for state in used), ""]
    if works:
        lines.append("Training works here.")
    else:
        lines.append('Training does NOT work here: mend what is marked "broken" first.')
    return "\n".join(lines)


def _wrapped(head: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False
    ) or [head.rstrip()]


def first_line(error: BaseException) -> str:
    """The first line of its message."""
    return (str(error).splitlines() or [""])[0]
