"""One table, four ways to write it: text for the terminal, Markdown, CSV, JSON.

Text and Markdown round, leave out columns that hold nothing, and end with the notes; Markdown has links. CSV and JSON
hold every column and every digit; the ends of an interval and the number of runs behind a mean are columns there.
JSON also says where they come from, where one command made them all.
"""

import csv
import io
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..record import without_nan
from ..settings import check, nearest

__all__ = [
    "Cell",
    "Column",
    "Estimate",
    "Link",
    "Mean",
    "Table",
    "called",
    "check_format",
    "one_line",
    "plain",
    "render",
    "shortened",
    "used",
    "written",
]


@dataclass(frozen=True)
class Estimate:
    """A number with its interval."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Mean:
    """The mean of a number over `count` of `total` runs; the others have none."""

    value: float
    count: int
    total: int


class Link(str):
    """A name, and the file to which it leads where the format has links."""

    file: Path

    def __new__(cls, name: str, file: Path) -> "Link":
        link = super().__new__(cls, name)
        link.file = file
        return link


Cell = str | float | Estimate | Mean | None  # None is a number that there is not


@dataclass(frozen=True)
class Column:
    """One column: the key by which it is asked for, what stands above it, and how its numbers are written."""

    key: str
    head: str
    digits: int = 1
    span: bool = True  # whether intervals are shown
    thousands: bool = False  # whether they are set apart
    spare: bool = False  # the first to go where the terminal is narrow


Side = tuple[Column, list[Cell]]  # a column with its cells


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns, and what has to be said about them."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)  # settings, versions and commit behind all of it

    def sorted_by(self, key: str) -> "Table":
        """By one column: names in their order, numbers with the largest first, what is missing last."""
        keys = [column.key for column in self.columns]
        check(key in keys, f"there is no column {key!r} to sort by; {nearest(key, keys)}")
        place = keys.index(key)

        def rank(row: tuple[Cell, ...]) -> tuple[int, float, str]:
            cell = row[place]
            if cell is None:
                return 2, 0.0, ""
            return (1, 0.0, cell) if isinstance(cell, str) else (0, -float(plain(cell)), "")

        return replace(self, rows=tuple(sorted(self.rows, key=rank)))


def plain(cell: float | Estimate | Mean) -> float:
    """The number itself."""
    return cell if isinstance(cell, int | float) else cell.value


_FORMATS = ("text", "markdown", "csv", "json")


def check_format(format: str) -> None:
    """Refuse what `render` cannot write."""
    check(format in _FORMATS, f"no format {format!r}; {nearest(format, _FORMATS)}")


def render(table: Table, format: str = "text", width: int | None = None, beside: Path | None = None) -> str:
    """The table as text, Markdown, CSV or JSON; `width` is how wide text may be, None for as wide as it is.

    Markdown that will lie in the folder `beside` links to files from there; without one it has no links.
    """
    check_format(format)
    if format == "text":
        return _text(table, width)
    if format == "markdown":
        return _markdown(table, beside)
    return _csv(table) if format == "csv" else _json(table)


# Cells ------------------------------------------------------------------------------------------------------


def one_line(text: str) -> str:
    """Text without line breaks, escape sequences or anything else that is not seen."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def shortened(text: str, width: int = 48) -> str:
    """Long text without its middle, since names of runs begin alike and may end alike.

    >>> shortened("abcdefghij", 7)
    'abc…hij'
    """
    half = (width - 1) // 2
    return text if len(text) <= width else f"{text[:half]}…{text[-half:]}"


def called(path: str) -> str:
    """What a file is called: a model in a run folder is called after that.

    >>> called("weights/robust4.pt"), called("runs/robust/model.safetensors")
    ('robust4', 'robust')
    """
    file = Path(path)
    return file.resolve().parent.name if file.name == "model.safetensors" else file.stem


def written(cell: Cell, column: Column) -> str:
    """A cell as it is read: a dash where there is nothing, an interval where it has one."""
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return one_line(cell)
    number = f"{plain(cell):{',' if column.thousands else ''}.{column.digits}f}"
    if isinstance(cell, Mean) and cell.total > 1:
        return f"{number} ({cell.count if cell.count == cell.total else f'{cell.count} of {cell.total}'})"
    if isinstance(cell, Estimate) and column.span and cell.low is not None and cell.high is not None:
        return f"{number} [{cell.low:.{column.digits}f}, {cell.high:.{column.digits}f}]"
    return number


def _sides(table: Table) -> list[Side]:
    return [(column, [row[place] for row in table.rows]) for place, column in enumerate(table.columns)]


def used(table: Table) -> list[Side]:
    """The columns in which anything stands."""
    return [(column, cells) for column, cells in _sides(table) if any(cell is not None for cell in cells)]


# Formats ----------------------------------------------------------------------------------------------------


def _text(table: Table, width: int | None) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

    sides, absent = _fitted(used(table), width)
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column, cells in sides:
        words = all(cell is None or isinstance(cell, str) for cell in cells)
        grid.add_column(Text(one_line(column.head)), justify="left" if words else "right", overflow="fold")
    for place in range(len(table.rows)):
        grid.add_row(*(Text(shortened(written(cells[place], column))) for column, cells in sides))
    out = io.StringIO()
    # As text, not as a terminal: colours and links of a name would be the terminal's to obey.
    console = Console(file=out, width=width or 10_000, force_terminal=False, color_system=None, markup=False)
    console.print(grid)
    lines = [line.rstrip() for line in out.getvalue().rstrip().splitlines()]
    notes = [*(one_line(note) for note in table.notes), *([f"too wide for this terminal: {absent}"] if absent else [])]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _fitted(sides: list[Side], width: int | None) -> tuple[list[Side], str]:
    """What fits: spare columns go from the right, then the intervals; and what has gone."""

    def wide() -> int:
        cells = ([column.head, *(shortened(written(cell, column)) for cell in cells)] for column, cells in sides)
        return sum(max(map(len, each)) + 3 for each in cells) - 3

    absent: list[str] = []
    while width is not None and wide() > width:
        spare = [place for place, (column, _) in enumerate(sides) if column.spare]
        if spare:
            column, _ = sides.pop(spare[-1])
            absent.insert(0, column.head)
        elif any(column.span for column, _ in sides):
            sides = [(replace(column, span=False), cells) for column, cells in sides]
            absent.append("intervals")
        else:
            break
    return sides, ", ".join(absent)


def _markdown(table: Table, beside: Path | None) -> str:
    sides = used(table)

    def shown(cell: Cell, column: Column) -> str:
        text = _escaped(written(cell, column))
        return _linked(text, cell.file, beside) if isinstance(cell, Link) and beside is not None else text

    def line(cells: list[str]) -> str:
        return f"| {' | '.join(cells)} |"

    head = [line([_escaped(column.head) for column, _ in sides]), "|" + "---|" * len(sides)]
    body = [line([shown(cells[place], column) for column, cells in sides]) for place in range(len(table.rows))]
    return "\n".join([*head, *body, *(f"\n{_escaped(one_line(note))}" for note in table.notes)])


def _linked(text: str, file: Path, beside: Path) -> str:
    """A link from one folder to a file, which may be called anything."""
    way = Path(os.path.relpath(file, beside)).as_posix()
    inside = text.replace("[", "\\[").replace("]", "\\]")
    return f"[{inside}]({quote(os.fsencode(way))})"


def _escaped(text: str) -> str:
    """Nothing that Markdown would read as a cell's end, as HTML, as code, as emphasis or as a link."""
    for sign in "\\`*<|":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("](", "]\\(")


def _csv(table: Table) -> str:
    out = io.StringIO()
    head, lines = _values(table)
    csv.writer(out, lineterminator="\n").writerows([head, *lines])
    return out.getvalue().rstrip("\n")


def _json(table: Table) -> str:
    head, lines = _values(table)
    found = {"schema": "anchorhold.table/1", **table.about, "notes": table.notes}
    found["rows"] = [dict(zip(head, line)) for line in lines]
    return json.dumps(without_nan(found), indent=2, ensure_ascii=False, allow_nan=False)


def _values(table: Table) -> tuple[list[str], list[list[object]]]:
    """Names of all columns, with those that an interval and a mean have besides, and what stands in each row."""
    head: list[str] = []
    lines: list[list[object]] = [[] for _ in table.rows]
    for column, cells in _sides(table):
        parts: dict[str, Callable[[Cell], object]] = {"": _bare}
        if any(isinstance(cell, Estimate) for cell in cells):
            parts["_low"] = lambda cell: cell.low if isinstance(cell, Estimate) else None
            parts["_high"] = lambda cell: cell.high if isinstance(cell, Estimate) else None
        if any(isinstance(cell, Mean) for cell in cells):
            parts["_runs"] = lambda cell: cell.count if isinstance(cell, Mean) else None
        for ending, part in parts.items():
            head.append(one_line(column.key + ending))
            for line, cell in zip(lines, cells):
                line.append(part(cell))
    return head, lines


def _bare(cell: Cell) -> object:
    return one_line(cell) if isinstance(cell, str) else None if cell is None else plain(cell)
