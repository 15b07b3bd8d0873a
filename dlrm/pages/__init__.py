"""Self-contained HTML pages: tiles, tables with bars, and charts, without external resources.

Templates escape every value. Pages fit a phone and use a wide screen. Text has at least the
contrast that WCAG 2 asks for at level AA, and charts have a text for screen readers.
"""

import pkgutil
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from dlrm.documents import cell, printable

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_LONG = 40  # characters up to which a cell has one line
_LONGEST = 200  # characters up to which the header of a row is not shortened
_NUMERIC = "0123456789+-–<["  # first characters of numbers
_WIDTHS = {"%": 1.6, "+": 1.4, **dict.fromkeys(" .,-[]", 0.62)}  # in widths of a digit
Head = Sequence[tuple[str, Sequence[str]]]  # a group of columns: its title, and theirs


class Bar(NamedTuple):
    """A cell with a drawing on a scale from 0 to 1, and its text beside it.

    Attributes:
        text: text of the cell.
        begin, end: ends of the bar, or of an interval.
        dot: place of a value within an interval; None draws a bar.
        marks: places of lines that the column's cells share.
        level: class of its color, which another cell repeats as text.
    """

    text: str
    end: float
    begin: float = 0.0
    dot: float | None = None
    marks: Sequence[float] = ()
    level: str = ""


Cell = Bar | str | int | None


class Tile(NamedTuple):
    """A figure of the summary: its name, its value, and a note such as its interval."""

    name: str
    value: str
    note: str = ""


class Section(NamedTuple):
    """A section of a page.

    Attributes:
        title: its heading, and its name in the table of contents.
        parts: its content, from `table`, `chart` and other functions of `dlrm.pages`.
        half: whether it takes one of the two columns of a wide screen.
    """

    title: str
    parts: Sequence["Markup"]
    half: bool = False


def document(
    title: str, lead: Sequence[str], tiles: Sequence[Tile], sections: Sequence[Section]
) -> str:
    """Returns a whole page.

    Control characters are escaped, except line breaks, which HTML shows as a space.

    Args:
        lead: paragraphs below the heading.
        tiles: figures that sum the page up.
        sections: its sections, which a table of contents lists.
    """
    page = _templates().get_template("page.html")
    text = page.render(title=title, lead=lead, tiles=tiles, sections=sections)
    return "\n".join(map(printable, text.split("\n"))) + "\n"


def table(
    head: Head, rows: Sequence[Sequence[Cell]], caption: str, *, full: bool = False
) -> "Markup":
    """Returns a table, which scrolls, also by keyboard, if it is wider than the page.

    Args:
        head: groups of columns; their titles are shown if there are several.
        rows: cells; None is a dash. The first cell of a row is its header, such as the name of a
            field, and is shortened in the middle if it is long.
        caption: caption of the table, and its name for screen readers.
        full: whether the table takes the width of its section, and bars what texts leave.
    """
    shortened = [
        [cell(one, _LONGEST) if isinstance(one, str) and len(one) > _LONGEST else one, *others]
        for one, *others in rows
    ]
    columns = [*zip(*shortened, strict=True)]
    widths = [
        max((_width(c.text) for c in one if isinstance(c, Bar)), default=0) for one in columns
    ]
    kinds = [_kind(one) for one in columns]
    return part("table", head, shortened, widths, kinds, caption, full)


def _width(text: str) -> float:
    """Returns about how many digits are as wide as a text."""
    return round(sum(_WIDTHS.get(c, 1.0) for c in text), 1)


def _kind(cells: Sequence[Cell]) -> str:
    """Returns the class of a column: words are on the left, and long ones in several lines."""
    words = [c for c in cells if isinstance(c, str)]
    if len(words) < len(cells) or any(c[:1] in _NUMERIC for c in words if c):
        return ""
    return "long" if max(map(len, words)) > _LONG else "words"


def note(text: str) -> "Markup":
    """Returns a paragraph that explains."""
    return part("note", text)


def details(title: str, content: "Markup") -> "Markup":
    """Returns content that a click shows."""
    return part("details", title, content)


def grid(parts: Sequence["Markup"]) -> "Markup":
    """Returns parts, such as charts, in as many columns as fit."""
    return part("grid", parts)


def part(name: str, *values: Any) -> "Markup":
    """Renders values with a macro of `parts.html`."""
    macros: Any = _templates().get_template("parts.html").module
    return getattr(macros, name)(*values)


@cache
def _templates() -> "Environment":
    from jinja2 import Environment, FunctionLoader, StrictUndefined  # 35 ms: for pages only

    # A template may be in an archive, such as one that Spark sends.
    loader = FunctionLoader(lambda name: (pkgutil.get_data(__name__, name) or b"").decode())
    strict: dict[str, Any] = {"autoescape": True, "undefined": StrictUndefined}
    return Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, **strict)
