"""Charts of lines, as SVG that scales with the page."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dlrm.pages import part

if TYPE_CHECKING:
    from markupsafe import Markup

COLORS = ("#1f5f9e", "#b4500f", "#3a7d34", "#7a4a9c", "#8a6d00", "#0e7474")
REFERENCE = "#5c5c5c"
_WIDTH, _HEIGHT, _TOP, _RIGHT = 400, 190, 10, 14  # of the picture, and of what it draws in
_BOTTOM = _TOP + _HEIGHT
_COUNTS = 44  # height of histograms below the lines
_CHARACTER = 7  # width of a label's character, in units of the picture

Limits = tuple[float, float, float, float]


class ChartLine(NamedTuple):
    """A line of a chart.

    Attributes:
        name: its name in the legend.
        x, y: its points.
        dashed: whether it is a reference.
        dots: whether its points are marked.
        ends: low and high end of the interval of each point, or none.
        edges, counts: a histogram, drawn below the lines: ends of its bins, and their counts.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False
    dots: bool = False
    ends: Sequence[tuple[float, float]] = ()
    edges: Sequence[float] = ()
    counts: Sequence[float] = ()


def chart(
    title: str,
    x_name: str,
    y_name: str,
    lines: Sequence[ChartLine],
    told: str,
    limits: Limits,
) -> "Markup":
    """Returns a chart of lines.

    Args:
        lines: lines to draw, in this order; those without points still use up a color.
        told: description of the chart for screen readers.
        limits: least and greatest x, least and greatest y.
    """
    x0, x1, y0, y1 = limits
    most = max((count for line in lines for count in line.counts), default=0)
    left = 24 + _CHARACTER * max(len(f"{y:g}") for y in ticks(y0, y1))
    frame = _Frame(limits, left, _BOTTOM + (_COUNTS + 8 if most else 0))
    drawn = [
        _drawn(line, REFERENCE if line.dashed else COLORS[index % len(COLORS)], frame)
        | {"filled": [_steps(line, frame, _COUNTS / most)] if len(line.counts) else []}
        for index, line in enumerate(lines)
        if len(line.x)
    ]
    paths, numbers = _grid(frame)
    labels = [
        *numbers,
        _Label(12, _TOP + _HEIGHT / 2, y_name, "middle", turned=True),
        _Label((left + _WIDTH - _RIGHT) / 2, frame.floor + 32, x_name, "middle"),
        *([_Label(left - 5, frame.floor - _COUNTS / 2 + 4, "rows", "end")] if most else []),
    ]
    return part("chart", title, told, (_WIDTH, frame.floor + 38), paths, labels, drawn)


class _Label(NamedTuple):
    """A text of a chart: its place, and the end of it that is there."""

    x: float
    y: float
    text: str
    anchor: str
    turned: bool = False


class _Frame(NamedTuple):
    """The place of the lines in a picture; `floor` is that of the labels below."""

    limits: Limits
    left: float
    floor: float

    def place(self, x: float, y: float) -> tuple[float, float]:
        x0, x1, y0, y1 = self.limits
        width = _WIDTH - self.left - _RIGHT
        right, up = (x - x0) / (x1 - x0), (y - y0) / (y1 - y0)
        return round(self.left + width * right, 1), round(_BOTTOM - _HEIGHT * up, 1)


def _grid(frame: _Frame) -> tuple[list[str], list[_Label]]:
    """Returns the lines at ticks, and their numbers."""
    x0, x1, y0, y1 = frame.limits
    across = [(frame.place(x, y0)[0], f"{x:g}") for x in ticks(x0, x1)]
    up = [(frame.place(x0, y)[1], f"{y:g}") for y in ticks(y0, y1)]
    paths = [f"M{x} {_TOP}V{frame.floor}" for x, _ in across]
    paths += [f"M{frame.left:.1f} {y}H{_WIDTH - _RIGHT}" for y, _ in up]
    labels = [_Label(x, frame.floor + 15, text, "middle") for x, text in across]
    return paths, labels + [_Label(frame.left - 5, y + 4, text, "end") for y, text in up]


def _drawn(line: ChartLine, color: str, frame: _Frame) -> dict[str, Any]:
    """Returns the parts of a line for the template."""
    at = [frame.place(x, y) for x, y in zip(line.x, line.y, strict=True)]
    ends = zip(line.x, line.ends, strict=True) if line.ends else ()
    ranges = [(*frame.place(x, low), frame.place(x, high)[1]) for x, (low, high) in ends]
    return {
        "name": line.name,
        "color": color,
        "dashed": line.dashed,
        "path": "M" + "L".join(f"{x} {y}" for x, y in at),
        "dots": at if line.dots else [],
        "ranges": [f"M{x} {low}V{high}m-3 0h6m-6 {low - high:.1f}h6" for x, low, high in ranges],
    }


def _steps(line: ChartLine, frame: _Frame, scale: float) -> str:
    """Returns the outline of a histogram that stands on the floor."""
    edges = [frame.place(x, 0)[0] for x in line.edges]
    tops = (
        f"V{frame.floor - count * scale:.1f}H{end}"
        for count, end in zip(line.counts, edges[1:], strict=True)
    )
    return f"M{edges[0]} {frame.floor}{''.join(tops)}V{frame.floor}Z"


def ticks(low: float, high: float) -> list[float]:
    """Returns three to seven round numbers from `low` to `high`."""
    raw = (high - low) / 6
    power = 10.0 ** int(f"{raw:e}".partition("e")[2])
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    first = -(-low // step)
    count = int((high - first * step) / step + 1e-9) + 1
    return [round((first + i) * step, 12) for i in range(count)]
