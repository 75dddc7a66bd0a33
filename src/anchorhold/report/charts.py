"""Charts as inline SVG: axes, lines, points with a tip. Colours are CSS classes, for a light and a dark mode."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .marks import DASHES, PALETTE, SHAPES, in_turn, overlap

if TYPE_CHECKING:
    from markupsafe import Markup

__all__ = ["Axis", "Mark", "Point", "Series", "chart", "key", "ticks"]

_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 12, 40
_LETTER, _HIGH = 7.5, 13  # width of a letter and height of a line of a label, pixels

_Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class Point:
    """One value, its tip, and the ends of its intervals."""

    x: float
    y: float
    tip: str
    x_span: tuple[float, float] | None = None
    y_span: tuple[float, float] | None = None
    label: str = ""


@dataclass(frozen=True)
class Series:
    """Points of one kind, joined by a line if they are a curve; `look` is the number of colour, dash and shape."""

    name: str
    points: Sequence[Point]
    look: int = 0
    line: bool = True
    grey: bool = False
    focus: bool = False  # whether every point can be reached by keyboard


@dataclass(frozen=True)
class Mark:
    """A dashed horizontal line, with a word."""

    y: float
    word: str


@dataclass(frozen=True)
class Axis:
    """The name of an axis, and values that it must include."""

    name: str
    shows: tuple[float, ...] = ()
    whole: bool = False  # ticks at whole numbers only


def chart(
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    about: str,
    marks: Sequence[Mark] = (),
    bands: Sequence[tuple[float, float]] = (),
    size: tuple[int, int] = (420, 250),
) -> "Markup":
    """An SVG of these series; `bands` are shaded ranges of x, `about` is the text for screen readers."""
    points = [point for each in series for point in each.points]
    spans = [(p.x_span or (p.x, p.x), p.y_span or (p.y, p.y)) for p in points]
    xs = _scale([v for span, _ in spans for v in span] + [*x.shows], x.whole)
    ys = _scale([v for _, span in spans for v in span] + [*y.shows], y.whole)
    width, height = size

    def across(v: float) -> float:
        return round(_LEFT + (v - xs[0]) / (xs[-1] - xs[0]) * (width - _LEFT - _RIGHT), 2)

    def up(v: float) -> float:
        return round(height - _BOTTOM - (v - ys[0]) / (ys[-1] - ys[0]) * (height - _TOP - _BOTTOM), 2)

    drawn: list[Markup] = []
    for low, high in bands:
        wide = max(across(high) - across(low), 3)
        drawn.append(_tag("rect", "band", x=across(low), y=_TOP, width=wide, height=height - _TOP - _BOTTOM))
    for value in ys:
        drawn.append(_tag("line", "grid", x1=_LEFT, x2=width - _RIGHT, y1=up(value), y2=up(value)))
        drawn.append(_tag("text", "tick end", _said(value, ys), x=_LEFT - 6, y=up(value) + 4))
    for value in xs:
        drawn.append(_tag("text", "tick mid", _said(value, xs), x=across(value), y=height - _BOTTOM + 16))
    middle = (_LEFT + width - _RIGHT) / 2
    drawn.append(_tag("text", "axis mid", x.name, x=middle, y=height - 6))
    turned = {"transform": f"rotate(-90 11 {(height - _BOTTOM + _TOP) / 2})"}
    drawn.append(_tag("text", "axis mid", y.name, x=11, y=(height - _BOTTOM + _TOP) / 2, **turned))
    for mark in marks:
        drawn.append(_tag("line", "mark", x1=_LEFT, x2=width - _RIGHT, y1=up(mark.y), y2=up(mark.y)))
        drawn.append(_tag("text", "tick end", mark.word, x=width - _RIGHT, y=up(mark.y) - 4))
    words = _places([(across(p.x), up(p.y), p.label) for p in points if p.label], width)
    for each in series:
        drawn += _series(each, across, up, words)
    body = _joined(drawn)
    return _tag(
        "svg",
        "chart wide" if width > 500 else "chart",
        body,
        viewBox=f"0 0 {width} {height}",
        role="group",
        **{"aria-label": about},
    )


def key(series: Sequence[Series]) -> "Markup":
    """A key: the colour and mark of each series, with its name."""
    from markupsafe import Markup

    words = []
    for each in series:
        colour = "grey" if each.grey else f"c{each.look % len(PALETTE)}"
        dash = in_turn(DASHES, each.look)
        rule = [_tag("path", "line", d="M0 9H26", **({"stroke-dasharray": dash} if dash else {}))] if each.line else []
        shape = _tag("path", "shape", d=in_turn(SHAPES, each.look), transform="translate(13 9)")
        drawn = _tag("svg", colour, _joined([*rule, shape]), **{"aria-hidden": "true"})
        words.append(Markup("<span>{} <bdi>{}</bdi></span>").format(drawn, each.name))
    return Markup('<div class="key">{}</div>').format(_joined(words))


def _places(
    points: Sequence[tuple[float, float, str]], width: float
) -> dict[tuple[float, float, str], tuple[int, int]]:
    """The offset of each label from its point; negative x means that the label ends there.

    A label must not cover another label, or another labelled point. Positions right and left, above and below are
    tried, nearer ones first. If none is free, the first is used.
    """
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y, _ in points]
    found = {}
    for x, y, label in points:

        def box(right: int, down: int, x: float = x, y: float = y, long: float = _LETTER * len(label)) -> _Box:
            begins = x + right - (long if right < 0 else 0)
            return begins, y + down - _HIGH, begins + long, y + down

        own = (x - 5, y - 5, x + 5, y + 5)
        sides = (7, -7) if x + 7 + _LETTER * len(label) <= width else (-7, 7)
        tried = [(right, down) for down in (-7, 7 + _HIGH, -7 - _HIGH, 7 + 2 * _HIGH) for right in sides]
        free = (
            each
            for each in tried
            if box(*each)[0] >= _LEFT and box(*each)[2] <= width
            if not any(overlap(box(*each), other) for other in taken if other != own)
        )
        found[x, y, label] = place = next(free, tried[0])
        taken.append(box(*place))
    return found


def _series(series: Series, across: Any, up: Any, words: Mapping[Any, tuple[int, int]]) -> "list[Markup]":
    colour = "grey" if series.grey else f"c{series.look % len(PALETTE)}"
    drawn: list[Markup] = []
    if series.line and len(series.points) > 1:
        path = " ".join(f"{across(p.x)},{up(p.y)}" for p in series.points)
        dash = in_turn(DASHES, series.look)
        drawn.append(_tag("polyline", f"line {colour}", points=path, **({"stroke-dasharray": dash} if dash else {})))
    many = series.line and len(series.points) > 20  # a shape at every point would hide the line
    for p in series.points:
        place = f"translate({across(p.x)} {up(p.y)})"
        if p.x_span:
            ends = {"x1": across(p.x_span[0]), "x2": across(p.x_span[1]), "y1": up(p.y), "y2": up(p.y)}
            drawn.append(_tag("line", f"span {colour}", **ends))
        if p.y_span:
            ends = {"x1": across(p.x), "x2": across(p.x), "y1": up(p.y_span[0]), "y2": up(p.y_span[1])}
            drawn.append(_tag("line", f"span {colour}", **ends))
        shape = [] if many else [_tag("path", "shape", d=in_turn(SHAPES, series.look))]
        right, down = words.get((across(p.x), up(p.y), p.label), (0, 0))
        side = "label end" if right < 0 else "label"
        word = [_tag("text", side, p.label, x=right, y=down)] if p.label else []
        target = _tag("circle", "target", r=9)
        reach = {"tabindex": "0", "role": "img", "aria-label": p.tip} if series.focus else {}
        inside = _joined([*shape, *word, target])
        drawn.append(_tag("g", f"point {colour}", inside, transform=place, **{"data-tip": p.tip}, **reach))
    return drawn


def _scale(values: Sequence[float], whole: bool) -> list[float]:
    return ticks(min(values), max(values), whole=whole) if values else [0.0, 1.0]


def ticks(low: float, high: float, count: int = 5, whole: bool = False) -> list[float]:
    """About `count` round numbers from below `low` to above `high`.

    >>> ticks(0.1, 0.9)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    >>> ticks(3, 3)
    [2.0, 2.5, 3.0, 3.5, 4.0]
    """
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = low - 1, high + 1
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * unit for unit in (1, 2, 5, 10) if power * unit >= rough * 0.999)
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * at, 12) + 0.0 for at in range(first, last + 1)]


def _said(value: float, scale: Sequence[float]) -> str:
    step = abs(scale[1] - scale[0])
    if step >= 1e6:  # no room for all digits
        return f"{value:.3g}"
    return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def _tag(name: str, kind: str, body: Any = "", **attributes: Any) -> "Markup":
    """An element; everything that is not markup is escaped."""
    from markupsafe import Markup

    # No spaces between elements: they would become text of a label.
    pairs = Markup("").join(Markup(' {}="{}"').format(Markup(key), value) for key, value in attributes.items())
    return Markup('<{0} class="{1}"{2}>{3}</{0}>').format(Markup(name), kind, pairs, body)


def _joined(parts: "Sequence[Markup]") -> "Markup":
    from markupsafe import Markup

    return Markup("\n").join(parts)
