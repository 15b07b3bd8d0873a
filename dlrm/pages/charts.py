"""Charts of lines, as SVG that scales with the page."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dlrm.pages import _part, note

if TYPE_CHECKING:
    from markupsafe import Markup

COLOURS = ("#1f5f9e", "#b4500f", "#3a7d34", "#7a4a9c", "#8a6d00", "#0e7474")
_REFERENCE = "#5c5c5c"
_WIDTH, _HEIGHT, _TOP, _RIGHT = 400, 190, 10, 14  # of the picture, and of what it draws in
_COUNTS = 44  # height of histograms below the lines
_CHARACTER = 7  # width of a label's character, in units of the picture

Limits = tuple[float, float, float, float]
Place = Callable[[float, float], tuple[float, float]]


class Line(NamedTuple):
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
    lines: Sequence[Line],
    told: str,
    limits: Limits | None = None,
) -> "Markup":
    """Returns a chart of lines.

    Args:
        title: title of the chart.
        x_name, y_name: names of the axes.
        lines: lines to draw, in this order; those without points still use up a color.
        told: description of the chart for screen readers.
        limits: least and greatest x, least and greatest y; by default those of the lines.
    """
    points = [(x, y) for line in lines for x, y in zip(line.x, line.y, strict=True)]
    points += [(x, y) for line in lines for x, ends in _ranges(line) for y in ends]
    if not points:
        return note(f"{title}: nothing to draw")
    x0, x1, y0, y1 = limits or _limits(points)
    marks = [(y, number(y)) for y in ticks(y0, y1)]
    left = 24 + _CHARACTER * max(len(text) for _, text in marks)
    width, bottom = _WIDTH - left - _RIGHT, _TOP + _HEIGHT
    most = max((count for line in lines for count in line.counts), default=0)
    floor = bottom + (_COUNTS + 8 if most else 0)

    def place(x: float, y: float) -> tuple[float, float]:
        right, up = (x - x0) / (x1 - x0), (y - y0) / (y1 - y0)
        return round(left + width * right, 1), round(bottom - _HEIGHT * up, 1)

    grid, labels = [], [(12, _TOP + _HEIGHT / 2, y_name, "middle", True)]
    for x in ticks(x0, x1):
        at, _ = place(x, y0)
        grid.append(f"M{at} {_TOP}V{floor}")
        labels.append((at, floor + 15, number(x), "middle", False))
    for y, text in marks:
        _, at = place(x0, y)
        grid.append(f"M{left:.1f} {at}H{_WIDTH - _RIGHT}")
        labels.append((round(left - 5, 1), at + 4, text, "end", False))
    if most:
        labels.append((round(left - 5, 1), floor - _COUNTS / 2 + 4, "rows", "end", False))
    labels.append((round(left + width / 2, 1), floor + 32, x_name, "middle", False))
    drawn = [
        _drawn(line, _REFERENCE if line.dashed else COLOURS[index % len(COLOURS)], place)
        | {"filled": [_steps(line, place, floor, _COUNTS / most)] if len(line.counts) else []}
        for index, line in enumerate(lines)
        if len(line.x)
    ]
    return _part("chart", title, told, (_WIDTH, floor + 38), grid, labels, drawn)


def _drawn(line: Line, colour: str, place: Place) -> dict[str, Any]:
    """Returns what a template draws of a line."""
    at = [place(x, y) for x, y in zip(line.x, line.y, strict=True)]
    ranges = [(*place(x, low), place(x, high)[1]) for x, (low, high) in _ranges(line)]
    return {
        "name": line.name,
        "colour": colour,
        "dashed": line.dashed,
        "path": "M" + "L".join(f"{x} {y}" for x, y in at),
        "dots": at if line.dots else [],
        "ranges": [f"M{x} {low}V{high}m-3 0h6m-6 {low - high:.1f}h6" for x, low, high in ranges],
    }


def _ranges(line: Line) -> list[tuple[float, tuple[float, float]]]:
    return [*zip(line.x, line.ends, strict=True)] if line.ends else []


def _steps(line: Line, place: Place, floor: float, scale: float) -> str:
    """Returns the outline of a histogram that stands on `floor`."""
    edges = [place(x, 0)[0] for x in line.edges]
    tops = (
        f"V{floor - count * scale:.1f}H{end}"
        for count, end in zip(line.counts, edges[1:], strict=True)
    )
    return f"M{edges[0]} {floor}{''.join(tops)}V{floor}Z"


def _limits(points: Sequence[tuple[float, float]]) -> Limits:
    bounds = []
    for values in zip(*points, strict=True):
        low, high = min(values), max(values)
        margin = (high - low) * 0.04 or abs(high) * 0.05 or 1.0
        bounds += [low - margin, high + margin]
    return bounds[0], bounds[1], bounds[2], bounds[3]


def ticks(low: float, high: float) -> list[float]:
    """Returns three to seven round numbers from `low` to `high`."""
    raw = (high - low) / 6
    power = 10.0 ** _floor_log10(raw)
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    first = -(-low // step)
    count = int((high - first * step) / step + 1e-9) + 1
    return [round((first + i) * step, 12) for i in range(count)]


def _floor_log10(value: float) -> int:
    return int(f"{value:e}".partition("e")[2])


def number(value: float) -> str:
    """Returns a number as text for an axis."""
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k" if abs(value) < 1e6 else f"{value / 1e6:g}M"
    return f"{value:g}"
