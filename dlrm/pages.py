"""Self-contained HTML pages: tables and charts in SVG, without scripts or external resources.

Charts have a text for screen readers, pages fit a phone, and text has at least the contrast that
WCAG 2 asks for at level AA. Only the standard library is imported.
"""

import html
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dlrm.documents import printable

STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 84em; padding: 0 1em;
       color: #222; background: #fff }
h1 { font-size: 1.6em; overflow-wrap: anywhere } h2 { margin-top: 2em }
p { max-width: 56em; overflow-wrap: anywhere } .note { color: #555 } .wide { overflow-x: auto }
table { border-collapse: collapse; margin: 1em 0 } th { font-weight: 600; text-align: right }
td, th { padding: .15em .7em; border-bottom: 1px solid #ddd; white-space: nowrap }
td { text-align: right; font-variant-numeric: tabular-nums }
td:first-child, th:first-child { text-align: left } th.group { text-align: center }
.large { background: #f4b6a6 } .some { background: #fbe7b2 }
figure { display: inline-block; margin: 1em 2em 0 0; vertical-align: top; max-width: 100%;
         overflow-x: auto }
svg text { font: 11px system-ui, sans-serif; fill: #444 }
@media (max-width: 30em) { table { font-size: .86em } td, th { padding: .15em .35em } }
svg .title { font-weight: 600; fill: #222 }
"""
COLOURS = ("#1f5f9e", "#b4500f", "#3a7d34", "#7a4a9c", "#8a6d00", "#0e7474")
_REFERENCE = "#5c5c5c"
Head = Sequence[tuple[str, Sequence[str]]]  # a group of columns: its title, and theirs


class Line(NamedTuple):
    """A line of a chart: its name in the legend, and its points; a dashed one is a reference."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False
    dots: bool = False


def document(title: str, parts: Sequence[str], style: str = "") -> str:
    """Returns a whole page from parts in HTML; `style` follows the common one.

    Control characters in parts are escaped, except line breaks, which HTML shows as a space.
    """
    lines = "\n".join(
        [
            "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
            "<meta name='viewport' content='width=device-width, initial-scale=1'>",
            f"<title>{html.escape(title)}</title><style>{STYLE}{style}</style></head><body><main>",
            f"<h1>{html.escape(title)}</h1>",
            *parts,
            "</main></body></html>\n",
        ]
    ).split("\n")
    return "\n".join(map(printable, lines))


def table(head: Head, rows: Sequence[Sequence[Any]], label: str = "table") -> str:
    """Returns a table, which scrolls if it is wider than the page.

    Args:
        head: groups of columns; their titles are shown if there are several.
        rows: integers, texts, or None for a dash.
        label: description for screen readers.
    """
    lines = []
    if len(head) > 1:
        groups = [f"<th class='group' colspan='{len(c)}'>{html.escape(g)}</th>" for g, c in head]
        lines.append("".join(groups))
    lines.append("".join(f"<th scope='col'>{html.escape(t)}</th>" for _, c in head for t in c))
    lines += ["".join(f"<td>{cell(value)}</td>" for value in row) for row in rows]
    text = "".join(f"<tr>{line}</tr>" for line in lines)
    return scrolled(f"<table>{text}</table>", label)


def scrolled(content: str, label: str) -> str:
    """Returns content that scrolls, also by keyboard, if it is wider than the page."""
    name = html.escape(label, quote=True)
    return f"<div class='wide' role='region' tabindex='0' aria-label='{name}'>{content}</div>"


def cell(value: str | int | None) -> str:
    """Returns the text of a table's cell."""
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else html.escape(value)


def side_bars(title: str, names: Sequence[str], values: Sequence[float], digits: int = 4) -> str:
    """Returns horizontal bars from zero to both sides, with their values beside them."""
    left = 8 + 7 * max(map(len, names), default=0)
    low, high = min([*values, 0.0]), max([*values, 0.0])
    scale = 150 / ((high - low) or 1)
    zero = left - low * scale
    shapes = [f"<text class='title' x='0' y='12'>{html.escape(title)}</text>"]
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        y = 22 + 16 * i
        begin, width = zero + min(value, 0) * scale, abs(value) * scale
        colour = COLOURS[0] if value >= 0 else COLOURS[1]
        shapes.append(f"<text x='0' y='{y + 10}'>{html.escape(name)}</text>")
        shapes.append(
            f"<rect x='{begin:.1f}' y='{y}' width='{width:.1f}' height='12' fill='{colour}'/>"
        )
        end = zero + max(value, 0) * scale + 4
        shapes.append(f"<text x='{end:.1f}' y='{y + 10}'>{value:.{digits}f}</text>")
    bottom = 24 + 16 * len(names)
    shapes.append(f"<path d='M{zero:.1f} 18V{bottom}' stroke='#888'/>")
    told = ", ".join(f"{n} {v:.{digits}f}" for n, v in zip(names, values, strict=True))
    return _figure((left + 220, bottom + 4), f"{title}: {told}", shapes)


def whiskers(
    title: str, names: Sequence[str], intervals: Sequence[tuple[float, float | None, float | None]]
) -> str:
    """Returns a dot for each value, with a line from the low to the high end of its interval."""
    ends = [end for interval in intervals for end in interval if end is not None]
    left = 12 + 7 * max(map(len, names), default=0)
    x0, x1, *_ = _limits([(end, 0.0) for end in ends])

    def place(x: float) -> float:
        return left + 220 * (x - x0) / (x1 - x0)

    bottom = 24 + 16 * len(names)
    shapes = [f"<text class='title' x='0' y='12'>{html.escape(title)}</text>"]
    for x in ticks(x0, x1):
        shapes.append(f"<path d='M{place(x):.1f} 18V{bottom}' stroke='#e2e2e2'/>")
        shapes.append(_text(place(x), bottom + 13, number(x), "middle"))
    for i, (name, (value, low, high)) in enumerate(zip(names, intervals, strict=True)):
        y = 28 + 16 * i
        shapes.append(_text(0, y + 4, name))
        if low is not None and high is not None:
            shapes.append(
                f"<path d='M{place(low):.1f} {y}H{place(high):.1f}' stroke='{COLOURS[0]}'/>"
            )
        shapes.append(f"<circle cx='{place(value):.1f}' cy='{y}' r='3.5' fill='{COLOURS[0]}'/>")
    told = ", ".join(f"{n} {v[0]:.4f}" for n, v in zip(names, intervals, strict=True))
    return _figure((left + 240, bottom + 18), f"{title}: {told}", shapes)


def chart(
    title: str,
    x_name: str,
    y_name: str,
    lines: Sequence[Line],
    told: str,
    limits: tuple[float, float, float, float] | None = None,
) -> str:
    """Returns a chart of lines.

    Args:
        title: title of the chart.
        x_name, y_name: names of the axes.
        lines: lines to draw, in this order; those without points still use up a color.
        told: description of the chart for screen readers.
        limits: least and greatest x, least and greatest y; by default those of the lines.
    """
    points = [(x, y) for line in lines for x, y in zip(line.x, line.y, strict=True)]
    if not points:
        return f"<p class='note'>{html.escape(title)}: nothing to draw</p>"
    x0, x1, y0, y1 = limits or _limits(points)
    left, top, width, height = 52, 22, 280, 190

    def place(x: float, y: float) -> tuple[float, float]:
        return left + width * (x - x0) / (x1 - x0), top + height * (1 - (y - y0) / (y1 - y0))

    shapes = [f"<text class='title' x='0' y='12'>{html.escape(title)}</text>"]
    for x in ticks(x0, x1):
        at, _ = place(x, y0)
        shapes.append(f"<path d='M{at:.1f} {top}V{top + height}' stroke='#e2e2e2'/>")
        shapes.append(_text(at, top + height + 14, number(x), "middle"))
    for y in ticks(y0, y1):
        _, at = place(x0, y)
        shapes.append(f"<path d='M{left} {at:.1f}H{left + width}' stroke='#e2e2e2'/>")
        shapes.append(_text(left - 5, at + 4, number(y), "end"))
    for index, line in enumerate(lines):
        if len(line.x):
            shapes += _drawn(line, _colour(line, index), place)
    bottom = top + height + 30
    shapes.append(_text(left + width / 2, bottom, x_name, "middle"))
    shapes.append(
        f"<text transform='translate(11,{top + height / 2}) rotate(-90)' text-anchor='middle'>"
        f"{html.escape(y_name)}</text>"
    )
    for index, line in enumerate(lines):
        if not len(line.x):
            continue
        bottom += 16
        dash = " stroke-dasharray='5 3'" if line.dashed else ""
        colour = _colour(line, index)
        shapes.append(
            f"<path d='M{left} {bottom - 4}h22' stroke='{colour}' stroke-width='2'{dash}/>"
        )
        shapes.append(_text(left + 28, bottom, line.name))
    return _figure((left + width + 16, bottom + 8), f"{title}. {told}", shapes)


def _colour(line: Line, index: int) -> str:
    return _REFERENCE if line.dashed else COLOURS[index % len(COLOURS)]


def _drawn(
    line: Line, colour: str, place: Callable[[float, float], tuple[float, float]]
) -> list[str]:
    at = [place(x, y) for x, y in zip(line.x, line.y, strict=True)]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
    dash = " stroke-dasharray='5 3'" if line.dashed else ""
    shapes = [f"<path d='M{path}' fill='none' stroke='{colour}' stroke-width='1.8'{dash}/>"]
    if line.dots:
        shapes += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2.6' fill='{colour}'/>" for x, y in at]
    return shapes


def _limits(points: Sequence[tuple[float, float]]) -> tuple[float, float, float, float]:
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


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'>{html.escape(text)}</text>"


def _figure(size: tuple[float, float], told: str, shapes: Sequence[str]) -> str:
    width, height = (round(length) for length in size)
    name = html.escape(told, quote=True)
    return (
        f"<figure><svg width='{width}' height='{height}' viewBox='0 0 {width} {height}' role='img' "
        f"aria-label='{name}'>{''.join(shapes)}</svg></figure>"
    )
