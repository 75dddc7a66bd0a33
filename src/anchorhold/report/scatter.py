"""Runs as points, with published rows in grey: R@1 against ERS, and ERS against the cost of training.

A filled mark is the published protocol, a hollow one under it the corrected, a cross the strong audit. The papers count
cost as η + 1 gradients per step. Ours is also counted in image-steps, since finished triplets are dropped. The cost
of a run includes that of the run it starts from.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RunError, check
from ..reproduce.comparison import row_of
from ..reproduce.rows import Row, published_on
from ..runs.fields import dig, number
from ..runs.folder import EXPORT
from .collect import Entry, data_name
from .figures import DPI, new_figure, plain_text, save_figure, writable
from .initialisation import start_of
from .marks import MARKERS, PALETTE, in_turn, overlap
from .tables import Estimate, plain
from .values import counts, judged

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

__all__ = ["SCATTERS", "drawn", "plot_cost", "plot_rows"]

Point = tuple[float, float]

_PROTOCOLS = ("published", "corrected", "strong")
_TITLES = {"cub": "Birds (CUB-200-2011)", "cars": "Cars (Cars-196)", "sop": "Stanford Online Products"}
_GREY, _DARK = "#b5b5b5", "#444444"
_LETTER = 7.5  # points
_MARK = 6.0
_COLLAPSED = 10.0  # published R@1 below which a model has collapsed, so that its ERS means nothing
_APART = 0.1  # horizontal distance between runs of one η, in powers of 2
_FAR = 16.0  # a label farther away than this gets a line to its mark


@dataclass(frozen=True, eq=False)
class _Shown:
    """A run with a score."""

    name: str
    r1: float
    ers: dict[str, float]  # by protocol
    steps: float
    image_steps: float | None  # including those of the runs it started from; None where unknown
    row: Row | None
    place: int


def plot_rows(entries: Sequence[Entry], out: str | Path) -> Path:
    """Draw R@1 against ERS, with a dotted line from each run to the published row that it repeats."""
    out = writable(out)
    shown, data = _shown(entries)
    published = _published(data)
    figure, (axis,) = new_figure(1, 7.2, 4.9)
    grey = _draw_published(axis, published, lambda row: row.published["R@1"])
    for run in shown:
        if run.row and "published" in run.ers and {"R@1", "ERS"} <= {*run.row.published}:
            ends = (run.r1, run.row.published["R@1"]), (run.ers["published"], run.row.published["ERS"])
            axis.plot(*ends, color=_DARK, linestyle=":", linewidth=0.9, zorder=2)
        _draw_run(axis, run, run.r1)
    axis.set(xlabel="R@1 (%)", ylabel="ERS", title=plain_text(_TITLES.get(data, data)))
    axis.set_ylim(bottom=max(axis.get_ylim()[0], 0.0))
    points = {run: run.r1 for run in shown}
    last = lambda: _label(axis, points, grey)  # noqa: E731
    return save_figure(figure, [axis], _legend(shown, published), out, last, drawn(entries))


def plot_cost(entries: Sequence[Entry], out: str | Path) -> Path:
    """Draw ERS against η + 1, the papers' cost, and against the image-steps of training."""
    out = writable(out)
    shown, data = _shown(entries)
    published = _published(data)
    figure, (left, right) = new_figure(2, 5.2, 4.4)
    grey = _draw_published(left, published, lambda row: row.published.get("steps", 0.0) + 1)
    counted = [run for run in shown if run.image_steps is not None]
    panels: tuple[tuple[Axes, dict[_Shown, float]], ...] = (
        (left, _side_by_side(shown)),
        (right, {run: (run.image_steps or 0.0) / 1e6 for run in counted}),
    )
    for axis, points in panels:
        for run, x in points.items():
            _draw_run(axis, run, x)
        axis.set_ylim(0, max(1.08 * each.dataLim.y1 for each, _ in panels))
    ticks = sorted({run.steps + 1 for run in shown} | {row.published.get("steps", 0.0) + 1 for row in published})
    left.set_xscale("log", base=2)
    left.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    left.set_xticks([], minor=True)
    left.margins(x=0.1)
    left.set(xlabel="η + 1", ylabel="ERS")
    unknown = ", ".join(plain_text(run.name, 28) for run in shown if run.image_steps is None)
    right.set(xlabel="image-steps of training (millions)" + (f"\nunknown for {unknown}" if unknown else ""))
    right.margins(x=0.1)
    figure.suptitle(plain_text(_TITLES.get(data, data)))

    def last() -> None:
        for axis, points in panels:
            _label(axis, points, grey if axis is left else [])

    return save_figure(figure, [left, right], _legend(shown, published), out, last, drawn(entries, cost=True))


SCATTERS: dict[str, Callable[[Sequence[Entry], str | Path], Path]] = {"rows": plot_rows, "cost": plot_cost}
"""Figures of runs as points, by name."""


def drawn(entries: Sequence[Entry], cost: bool = False) -> str:
    """The points of a figure of these runs as text. A PNG stores it, to detect outdated figures."""
    runs, data = _shown(entries)
    at = [f"{run.image_steps} {run.steps:g}" if cost else f"{run.r1:.1f}" for run in runs]
    points = [f"{run.name} {x} {' '.join(f'{p} {v:.1f}' for p, v in run.ers.items())}" for run, x in zip(runs, at)]
    return f"{data}: {'; '.join(points)}"


def _shown(entries: Sequence[Entry]) -> tuple[list[_Shown], str]:
    """Runs with R@1 and ERS, and their data set; collapsed models have no score."""
    found: list[_Shown] = []
    sets: dict[str, None] = {}
    for entry in entries:
        r1 = judged(entry, "r1")
        cells = {protocol: judged(entry, f"ers_{protocol}") for protocol in _PROTOCOLS}
        ers = {protocol: cell.value for protocol, cell in cells.items() if isinstance(cell, Estimate)}
        if counts(r1) and ers:
            steps, image_steps = number(entry.setting("steps")) or 0.0, _spent(entry, entries)
            found.append(_Shown(entry.name, plain(r1), ers, steps, image_steps, row_of(entry), len(found)))
            sets[data_name(entry) or "?"] = None
    if not found:
        raise RunError("no run here has both R@1 and ERS, so there is nothing to draw; audit one with all nine attacks")
    check(len(sets) == 1, f"a figure shows one data set, and these runs use {', '.join(sets)}: give fewer folders")
    return found, next(iter(sets))


def _spent(entry: Entry, entries: Sequence[Entry]) -> float | None:
    """The image-steps of a run and of the runs in `entries` that it started from; None if one is missing."""
    own, source = number(entry.info.get("image_steps")), dig(entry.info, "model", "weights", "source")
    if own is None or Path(str(source)).name != EXPORT:
        return own
    start = start_of(entry, entries)
    before = None if start is None else _spent(start, [other for other in entries if other is not entry])
    return None if before is None else own + before


def _published(data: str) -> list[Row]:
    return [row for row in published_on({data}) if row.published["R@1"] >= _COLLAPSED]


def _side_by_side(shown: Sequence[_Shown]) -> dict[_Shown, float]:
    """η + 1, with runs of one η slightly apart, so that they do not hide each other."""
    found: dict[_Shown, float] = {}
    for steps in {run.steps: None for run in shown}:
        own = [run for run in shown if run.steps == steps]
        found |= {run: (steps + 1) * 2 ** (_APART * (at - (len(own) - 1) / 2)) for at, run in enumerate(own)}
    return found


# Marks --------------------------------------------------------------------------------------------------------


def _draw_published(axis: "Axes", published: Sequence[Row], x: Callable[[Row], float]) -> list[Point]:
    """Draw the published rows; returns their positions."""
    points = [(x(row), row.published["ERS"]) for row in published]
    for row, point in zip(published, points):
        axis.plot(*point, **_grey(bool(row.published.get("init"))), zorder=1)
    return points


def _draw_run(axis: "Axes", run: _Shown, x: float) -> None:
    colour = _colour(run)
    ends = list(run.ers.values())
    axis.plot([x, x], [min(ends), max(ends)], color=colour, linewidth=0.9, zorder=3)
    for protocol, value in run.ers.items():
        axis.plot(
            x, value, **_mark(protocol, colour, in_turn(MARKERS, run.place + run.place // len(PALETTE))), zorder=4
        )


def _colour(run: _Shown) -> str:
    return in_turn(PALETTE, run.place)


def _mark(protocol: str, colour: str, marker: str) -> dict[str, Any]:
    if protocol == "strong":
        return {"color": colour, "marker": "x", "markersize": _MARK, "linestyle": ""}
    inside = colour if protocol == "published" else "white"
    look = {"marker": marker, "markersize": _MARK, "linestyle": "", "markeredgewidth": 1.2}
    return {"color": colour, "markerfacecolor": inside, **look}


def _grey(robust: bool) -> dict[str, Any]:
    return {"color": _GREY, "marker": "+" if robust else "o", "markersize": 5 if robust else 3.5, "linestyle": ""}


def _legend(shown: Sequence[_Shown], published: Sequence[Row]) -> list[tuple[dict[str, Any], str]]:
    """The protocols of all runs, and the published rows."""
    there = [protocol for protocol in _PROTOCOLS if any(protocol in run.ers for run in shown)]
    names = [(_mark(protocol, _DARK, "o"), protocol) for protocol in there]
    for robust, words in ((False, "in the papers"), (True, "in the papers, robust start")):
        if any(bool(row.published.get("init")) == robust for row in published):
            names.append((_grey(robust), words))
    return names


# Labels -------------------------------------------------------------------------------------------------------


def _label(axis: "Axes", points: dict[_Shown, float], grey: Sequence[Point]) -> None:
    """Write the name of each run near its first mark, without covering names or marks, and few published rows.

    Positions on circles around the mark are tried. The axes must already have their layout, since sizes are in pixels.
    """
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    pixels = DPI / 72
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
            plain_text(run.name, 28),
            (x, y),
            (0, 0),
            textcoords="offset points",
            fontsize=_LETTER,
            color=_colour(run),
            annotation_clip=False,
            path_effects=[withStroke(linewidth=2, foreground="white", alpha=0.75)],  # dotted lines pass behind it
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
    """Candidate positions of a label: the distance from its mark, and the lower left corner, in points."""
    gap = _MARK / 2 + 3
    for far in (gap, 10, 14, 20, 28, 38, 50, 64, 80, 100):
        for side, up in ((1, 0), (-1, 0), (1, 0.7), (-1, 0.7), (1, -0.7), (-1, -0.7), (0, 1), (0, -1)):
            dx = far * side - (wide if side < 0 else 0 if side > 0 else wide / 2)
            yield far, dx, far * up - high / 2


def _hits(box: "Bbox", others: Sequence["Bbox"]) -> int:
    return sum(overlap(box.extents, other.extents) for other in others)
