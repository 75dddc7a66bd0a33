"""Runs as points with print behind them in grey: R@1 against ERS, and ERS against the cost of training.

A filled mark is the published protocol, a hollow one under it the corrected, a cross the strong audit. Print's cost is
η + 1 gradients of the network a step; ours is counted in image-steps as well, since triplets leave the ascent early.
A run that starts from the weights of another has cost what that one did, too.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RunError
from ..model.weights import EXPORT
from ..rows import Row, rows
from ..settings import check
from .collect import Entry, dig, number
from .compare import counts, judged
from .plots import _COLOURS, _DPI, SCATTERED, _checked, _drawn, _figure, _marker, _save
from .printed import row_of
from .tables import Estimate, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

__all__ = ["SCATTERS", "drawn", "plot_cost", "plot_rows"]

Point = tuple[float, float]

_PROTOCOLS = ("published", "corrected", "strong")
_GREY, _DARK = "#b5b5b5", "#444444"
_LETTER = 7.5  # points
_MARK = 6.0
_COLLAPSED = 10.0  # R@1 of print below which a model has collapsed, so that its ERS says nothing
_APART = 0.1  # between runs of one η, in doublings
_FAR = 16.0  # points beyond which a label needs a line to its mark


@dataclass(frozen=True, eq=False)
class _Shown:
    """A run that has a score."""

    name: str
    r1: float
    ers: dict[str, float]  # by protocol
    steps: float
    image_steps: float | None  # with those of the runs it goes back to; None where they are not known
    row: Row | None
    place: int


def plot_rows(entries: Sequence[Entry], out: str | Path) -> Path:
    """Draw R@1 against ERS, a dotted line from each run to the row of print that it repeats."""
    out = _checked(out)
    shown, data = _shown(entries)
    printed = _printed(data)
    figure, (axis,) = _figure(1, 7.2, 4.9)
    grey = _draw_print(axis, printed, lambda row: row.printed["R@1"])
    for run in shown:
        if run.row and "published" in run.ers and {"R@1", "ERS"} <= {*run.row.printed}:
            ends = (run.r1, run.row.printed["R@1"]), (run.ers["published"], run.row.printed["ERS"])
            axis.plot(*ends, color=_DARK, linestyle=":", linewidth=0.9, zorder=2)
        _draw_run(axis, run, run.r1)
    axis.set(xlabel="R@1 (%)", ylabel="ERS", title=_drawn(data))
    axis.set_ylim(bottom=max(axis.get_ylim()[0], 0.0))
    points = {run: run.r1 for run in shown}
    last = lambda: _label(axis, points, grey)  # noqa: E731
    return _save(figure, [axis], _legend(shown, printed), out, last, drawn(entries))


def plot_cost(entries: Sequence[Entry], out: str | Path) -> Path:
    """Draw ERS against η + 1, as print counts cost, and against the image-steps that training took."""
    out = _checked(out)
    shown, data = _shown(entries)
    printed = _printed(data)
    figure, (left, right) = _figure(2, 5.2, 4.4)
    grey = _draw_print(left, printed, lambda row: row.printed.get("steps", 0.0) + 1)
    counted = [run for run in shown if run.image_steps is not None]
    panels: tuple[tuple[Axes, dict[_Shown, float]], ...] = (
        (left, _side_by_side(shown)),
        (right, {run: (run.image_steps or 0.0) / 1e6 for run in counted}),
    )
    for axis, points in panels:
        for run, x in points.items():
            _draw_run(axis, run, x)
        axis.set_ylim(0, max(1.08 * each.dataLim.y1 for each, _ in panels))
    ticks = sorted({run.steps + 1 for run in shown} | {row.printed.get("steps", 0.0) + 1 for row in printed})
    left.set_xscale("log", base=2)
    left.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    left.set_xticks([], minor=True)
    left.margins(x=0.1)
    left.set(xlabel="η + 1", ylabel="ERS")
    unknown = ", ".join(_drawn(run.name, 28) for run in shown if run.image_steps is None)
    right.set(xlabel="image-steps of training (millions)" + (f"\nnot known of {unknown}" if unknown else ""))
    right.margins(x=0.1)
    figure.suptitle(_drawn(data))

    def last() -> None:
        for axis, points in panels:
            _label(axis, points, grey if axis is left else [])

    return _save(figure, [left, right], _legend(shown, printed), out, last, drawn(entries, cost=True))


SCATTERS: dict[str, Callable[[Sequence[Entry], str | Path], Path]] = dict(zip(SCATTERED, (plot_rows, plot_cost)))
"""Figures of runs as points, by name."""


def drawn(entries: Sequence[Entry], cost: bool = False) -> str:
    """The points of our own in a figure of these runs, in words: a PNG carries them, to be told from an old one."""
    runs, data = _shown(entries)
    at = [f"{run.image_steps} {run.steps:g}" if cost else f"{run.r1:.1f}" for run in runs]
    points = [f"{run.name} {x} {' '.join(f'{p} {v:.1f}' for p, v in run.ers.items())}" for run, x in zip(runs, at)]
    return f"{data}: {'; '.join(points)}"


def _shown(entries: Sequence[Entry]) -> tuple[list[_Shown], str]:
    """Runs with R@1 and an ERS, and the one data set they are on; a model that has collapsed has no score."""
    found: list[_Shown] = []
    sets: dict[str, None] = {}
    for entry in entries:
        r1 = judged(entry, "r1")
        cells = {protocol: judged(entry, f"ers_{protocol}") for protocol in _PROTOCOLS}
        ers = {protocol: cell.value for protocol, cell in cells.items() if isinstance(cell, Estimate)}
        if counts(r1) and ers:
            steps, image_steps = number(entry.setting("steps")) or 0.0, _spent(entry, entries)
            found.append(_Shown(entry.name, plain(r1), ers, steps, image_steps, row_of(entry), len(found)))
            name = dig(entry.info, "data", "name") or dig(entry.audit, "data", "query", "name") or "?"
            sets[str(name).split("/")[0]] = None
    if not found:
        raise RunError("no run here has both R@1 and ERS, so there is nothing to draw; audit one")
    check(len(sets) == 1, f"one figure is of one data set, and these are of {', '.join(sets)}: give fewer folders")
    return found, next(iter(sets))


def _spent(entry: Entry, entries: Sequence[Entry]) -> float | None:
    """The image-steps of a run and of those, among `entries`, whose weights it goes back to; None if one is missing."""
    own, weights = number(entry.info.get("image_steps")), dig(entry.info, "model", "weights") or {}
    source = str(weights.get("source"))
    if own is None or Path(source).name != EXPORT:
        return own
    others = [other for other in entries if other is not entry]
    start = [other for other in others if other.info.get("export", "") == weights.get("sha256")]
    # A run that is older does not say what it exported: it is known by its folder.
    start = start or [other for other in others if other.path.name == Path(source).parent.name]
    before = _spent(start[0], others) if len(start) == 1 else None
    return None if before is None else own + before


def _printed(data: str) -> list[Row]:
    known = (row for row in rows() if row.data == data and {"R@1", "ERS"} <= {*row.printed})
    return [row for row in known if row.printed["R@1"] >= _COLLAPSED]


def _side_by_side(shown: Sequence[_Shown]) -> dict[_Shown, float]:
    """η + 1, with runs of one η a little apart: they would hide each other."""
    found: dict[_Shown, float] = {}
    for steps in {run.steps: None for run in shown}:
        own = [run for run in shown if run.steps == steps]
        found |= {run: (steps + 1) * 2 ** (_APART * (at - (len(own) - 1) / 2)) for at, run in enumerate(own)}
    return found


# Marks --------------------------------------------------------------------------------------------------------


def _draw_print(axis: "Axes", printed: Sequence[Row], x: Callable[[Row], float]) -> list[Point]:
    """Draw the rows of print; where they are is returned."""
    points = [(x(row), row.printed["ERS"]) for row in printed]
    for row, point in zip(printed, points):
        axis.plot(*point, **_grey(bool(row.printed.get("init"))), zorder=1)
    return points


def _draw_run(axis: "Axes", run: _Shown, x: float) -> None:
    colour = _colour(run)
    ends = list(run.ers.values())
    axis.plot([x, x], [min(ends), max(ends)], color=colour, linewidth=0.9, zorder=3)
    for protocol, value in run.ers.items():
        axis.plot(x, value, **_mark(protocol, colour, _marker(run.place + run.place // len(_COLOURS))), zorder=4)


def _colour(run: _Shown) -> str:
    return _COLOURS[run.place % len(_COLOURS)]


def _mark(protocol: str, colour: str, marker: str) -> dict[str, Any]:
    if protocol == "strong":
        return {"color": colour, "marker": "x", "markersize": _MARK, "linestyle": ""}
    inside = colour if protocol == "published" else "white"
    look = {"marker": marker, "markersize": _MARK, "linestyle": "", "markeredgewidth": 1.2}
    return {"color": colour, "markerfacecolor": inside, **look}


def _grey(robust: bool) -> dict[str, Any]:
    return {"color": _GREY, "marker": "+" if robust else "o", "markersize": 5 if robust else 3.5, "linestyle": ""}


def _legend(shown: Sequence[_Shown], printed: Sequence[Row]) -> list[tuple[dict[str, Any], str]]:
    """The protocols that any run has, and print."""
    there = [protocol for protocol in _PROTOCOLS if any(protocol in run.ers for run in shown)]
    names = [(_mark(protocol, _DARK, "o"), protocol) for protocol in there]
    for robust, words in ((False, "in print"), (True, "in print, robust start")):
        if any(bool(row.printed.get("init")) == robust for row in printed):
            names.append((_grey(robust), words))
    return names


# Labels -------------------------------------------------------------------------------------------------------


def _label(axis: "Axes", points: dict[_Shown, float], grey: Sequence[Point]) -> None:
    """The name of each run near its first mark, where it covers no other name, no mark and as little print as can be.

    Tried are places on circles around the mark; the axes must be drawn already, since sizes are in pixels.
    """
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    pixels = _DPI / 72
    inside = axis.get_window_extent()

    def place(x: float, y: float) -> Point:
        across, up = axis.transData.transform((x, y))
        return float(across), float(up)

    def around(x: float, y: float, half: float) -> Bbox:
        across, up = place(x, y)
        return Bbox.from_extents(across - half, up - half, across + half, up + half)

    marks = [around(x, y, _MARK * pixels / 2) for run, x in points.items() for y in run.ers.values()]
    behind = [around(*point, 2 * pixels) for point in grey]
    taken: list[Bbox] = []

    def cost(box: Bbox, far: float) -> float:
        if not (inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1):
            return 1e9
        covered = 1e4 * _hits(box, taken) + 300 * _hits(box, marks) + 8 * _hits(box, behind)
        return covered + far

    for run, x in sorted(points.items(), key=lambda each: -max(each[0].ers.values())):
        y = next(iter(run.ers.values()))
        text = axis.annotate(
            _drawn(run.name, 28),
            (x, y),
            (0, 0),
            textcoords="offset points",
            fontsize=_LETTER,
            color=_colour(run),
            annotation_clip=False,
            path_effects=[withStroke(linewidth=2, foreground="white", alpha=0.75)],  # the lines to print pass behind it
            zorder=5,
        )
        text.set_in_layout(False)
        size = text.get_window_extent()
        middle_x, middle_y = place(x, y)
        options = []
        for far, dx, dy in _offsets(size.width / pixels, size.height / pixels):
            left, low = middle_x + dx * pixels, middle_y + dy * pixels
            box = Bbox.from_extents(left, low, left + size.width, low + size.height)
            options.append((cost(box, far), far, dx, dy, box))
        _, far, dx, dy, box = min(options, key=lambda option: option[0])
        taken.append(box)
        text.set_position((dx, dy))
        if far > _FAR:
            end_x, end_y = (min(max(middle_x, box.x0), box.x1), min(max(middle_y, box.y0), box.y1))
            back = axis.transData.inverted().transform([(middle_x, middle_y), (end_x, end_y)])
            (line,) = axis.plot(*zip(*back), color=_colour(run), linewidth=0.5, zorder=2, scalex=False, scaley=False)
            line.set_in_layout(False)


def _offsets(wide: float, high: float) -> Iterator[tuple[float, float, float]]:
    """How far a label is from its mark, and where its lower left corner then is, in points."""
    gap = _MARK / 2 + 3
    for far in (gap, 10, 14, 20, 28, 38, 50, 64, 80, 100):
        for side, up in ((1, 0), (-1, 0), (1, 0.7), (-1, 0.7), (1, -0.7), (-1, -0.7), (0, 1), (0, -1)):
            dx = far * side - (wide if side < 0 else 0 if side > 0 else wide / 2)
            yield far, dx, far * up - high / 2


def _hits(box: "Bbox", others: Sequence["Bbox"]) -> int:
    return sum(box.x0 < o.x1 and o.x0 < box.x1 and box.y0 < o.y1 and o.y0 < box.y1 for o in others)
