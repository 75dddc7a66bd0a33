"""The page of a comparison: a sortable table, significant differences, and R@1 against ERS with the papers in grey."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..reproduce.comparison import row_of
from ..reproduce.rows import Row, published_on
from .charts import Axis, Point, Series, chart, key
from .collect import Entry, data_name
from .compare import epsilon_table, runs_table
from .curve_chart import Drawn, drawn_together
from .epsilon import curves_by_norm
from .page import cut, fixed, write_page
from .recall_strong import at_each_eps
from .tables import Cell, Column, Estimate, Side, notes_of, plain, used, written
from .values import counts, value_of

if TYPE_CHECKING:
    from markupsafe import Markup

__all__ = ["write_compare_page"]

_FEW = 8  # up to this many points are labelled; more labels would overlap


@dataclass(frozen=True)
class Shown:
    """A cell of the page: its text, its value for sorting, and the ends of its interval."""

    text: str
    span: str
    value: str
    low: float | None = None
    high: float | None = None
    word: bool = False


def write_compare_page(entries: Sequence[Entry], out: str | Path, sort: str = "", problems: Sequence[str] = ()) -> Path:
    """Write a page that compares runs and audits to `out`; returns its path."""
    table = runs_table(entries)
    table = table.sorted_by(sort) if sort else table
    sides = used(table)
    lines = _lines(sides, len(table.rows))
    levels = epsilon_table(entries) if at_each_eps(entries) else None
    words = [all(cell is None or isinstance(cell, str) for cell in cells) for _, cells in sides]
    published = published_on({data_name(entry) for entry in entries})
    return write_page(
        "compare.html",
        Path(out),
        title=f"{len(entries)} runs compared",
        heads=[(column.head, word) for (column, _), word in zip(sides, words)],
        lines=lines,
        notes=notes_of(table, sides),
        problems=problems,
        curves=_curves(entries),
        levels=None if levels is None else ([c.head for c, _ in used(levels)], _lines(used(levels), len(levels.rows))),
        scatter=_scatter(entries, published),
        published=[(row, fixed(row.published["R@1"]), fixed(row.published["ERS"])) for row in published],
    )


def _lines(sides: Sequence[Side], count: int) -> list[list[Shown]]:
    return [[_cell(cells[at], column) for column, cells in sides] for at in range(count)]


def _cell(cell: Cell, column: Column) -> Shown:
    if cell is None or isinstance(cell, str):
        return Shown(written(cell, column), "", cell or "", word=True)
    value = plain(cell)
    low, high = (cell.low, cell.high) if isinstance(cell, Estimate) else (None, None)
    text = f"{value:{',' if column.thousands else ''}.{column.digits}f}"
    span = "" if low is None or high is None else f"[{low:.{column.digits}f}, {high:.{column.digits}f}]"
    return Shown(text, span if column.span else "", repr(float(value)), low, high)


def _curves(entries: Sequence[Entry]) -> list[Drawn]:
    """A chart of R@1 against ε for each norm."""
    by_norm = curves_by_norm(entries).items()
    drawn = (drawn_together([(cut(name), curve) for name, curve in curves], norm) for norm, curves in by_norm)
    return [each for each in drawn if each is not None]


# ---------------------------------------------------------------- R@1 against ERS


def _scatter(entries: Sequence[Entry], published: Sequence[Row]) -> "tuple[Markup, Markup, str] | None":
    asked = "ers_published" if any(_score(e, "ers_published") for e in entries) else "ers_corrected"
    series = []
    for look, entry in enumerate(entries):
        ers, found = _score(entry, asked), value_of(entry, "r1")
        if ers is None or not counts(found):
            continue
        r1 = plain(found)
        x_span, y_span = (_span(cell) for cell in (found, ers))
        tip = f"{cut(entry.name)}: R@1 {r1:.1f}, ERS {ers.value:.1f}{_in_paper(entry)}"
        label = cut(entry.name, 22) if len(entries) <= _FEW else ""
        point = Point(r1, ers.value, tip, x_span, y_span, label)
        series.append(Series(cut(entry.name), [point], look, line=False, focus=True))
    if not series:
        return None
    grey = []
    if published and asked == "ers_published":
        points = [_point(row) for row in published]
        grey = [Series("published rows", points, 0, line=False, grey=True)]
    protocol = asked.removeprefix("ers_")
    axes = Axis("R@1 (%)", (0.0,)), Axis(f"ERS, {protocol}", (0.0,))
    about = f"R@1 against ERS: {'; '.join(each.points[0].tip for each in series)}"
    return chart([*grey, *series], *axes, about, size=(600, 380)), key([*series, *grey]), protocol


def _point(row: Row) -> Point:
    r1, ers = row.published["R@1"], row.published["ERS"]
    return Point(r1, ers, f"{row.id}, {row.method}: R@1 {r1:.1f}, ERS {ers:.1f} in the paper")


def _span(cell: Cell) -> tuple[float, float] | None:
    if not isinstance(cell, Estimate) or cell.low is None or cell.high is None:
        return None
    return min(cell.low, cell.value), max(cell.high, cell.value)


def _score(entry: Entry, asked: str) -> Estimate | None:
    found = value_of(entry, asked)
    return found if isinstance(found, Estimate) else None


def _in_paper(entry: Entry) -> str:
    """The numbers of the published row that a run repeats."""
    row = row_of(entry)
    numbers = {} if row is None else row.published
    known = [f"{name} {numbers[name]:.1f}" for name in ("R@1", "ERS") if name in numbers]
    return f"; the paper reports {', '.join(known)}" if known else ""
