"""Tables in five formats: text for the terminal, Markdown, LaTeX, CSV, JSON.

Text, Markdown and LaTeX round, omit empty columns, and end with notes; Markdown has links. CSV and JSON have every
column and every digit, with extra columns for the ends of intervals and the number of runs behind a mean. JSON also has
the settings and versions if one command made all rows.
"""

import csv
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..errors import check, nearest
from ..runs.folder import without_nan
from ..runs.writing import csv_cell
from .latex import latex_table

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
    """A name, and the file it links to in formats with links."""

    file: Path

    def __new__(cls, name: str, file: Path) -> "Link":
        link = super().__new__(cls, name)
        link.file = file
        return link


Cell = str | float | Estimate | Mean | None  # None: no value


@dataclass(frozen=True)
class Column:
    """One column: its key, its head, and the format of its numbers."""

    key: str
    head: str
    digits: int = 1
    span: bool = True  # whether intervals are shown
    thousands: bool = False  # whether to separate thousands
    spare: bool = False  # dropped first on a narrow terminal


Side = tuple[Column, list[Cell]]  # a column with its cells


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns, and notes."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)  # settings, versions and commit of all rows

    def sorted_by(self, key: str) -> "Table":
        """Sorted by one column: names ascending, numbers descending, missing values last."""
        keys = [column.key for column in self.columns]
        check(key in keys, f"there is no column {key!r} to sort by; {nearest(key, keys)}")
        place = keys.index(key)

        def rank(row: tuple[Cell, ...]) -> tuple[int, float, str]:
            cell = row[place]
            if cell is None:
                return 2, 0.0, ""
            return (1, 0.0, cell) if isinstance(cell, str) else (0, -float(plain(cell)), "")

        return replace(self, rows=tuple(sorted(self.rows, key=rank)))

    def only(self, keys: Sequence[str]) -> "Table":
        """With these columns alone, in this order; the first column, which names the rows, is kept in front."""
        known = [column.key for column in self.columns]
        for key in keys:
            check(key in known, f"there is no column {key!r}; {nearest(key, known)}")
        places = list(dict.fromkeys([0, *map(known.index, keys)]))
        rows = tuple(tuple(row[place] for place in places) for row in self.rows)
        return replace(self, columns=tuple(self.columns[place] for place in places), rows=rows)


def plain(cell: float | Estimate | Mean) -> float:
    """The number itself."""
    return cell if isinstance(cell, int | float) else cell.value


_FORMATS = ("text", "markdown", "latex", "csv", "json")


def check_format(format: str) -> None:
    """Refuse formats that `render` does not know."""
    check(format in _FORMATS, f"no format {format!r}; {nearest(format, _FORMATS)}")


def render(
    table: Table, format: str = "text", width: int | None = None, beside: Path | None = None, role: str = ""
) -> str:
    """The table as text, Markdown, LaTeX, CSV or JSON; `width` limits the width of text, None for no limit.

    In Markdown, links are relative to the folder `beside`; without it there are none. With a `role` of Sphinx they are
    written as {role}`name <path>`, relative to `beside` too.
    """
    check_format(format)
    if format == "text":
        return _text(table, width)
    if format == "markdown":
        return _markdown(table, beside, role)
    if format == "latex":
        return _latex(table)
    return _csv(table) if format == "csv" else _json(table)


# Cells ------------------------------------------------------------------------------------------------------


def one_line(text: str) -> str:
    """Text without line breaks, escape sequences or other invisible characters."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def shortened(text: str, width: int = 48) -> str:
    """Long text without its middle, since names of runs may share a beginning or an end.

    >>> shortened("abcdefghij", 7)
    'abc…hij'
    """
    half = (width - 1) // 2
    return text if len(text) <= width else f"{text[:half]}…{text[-half:]}"


def called(path: str) -> str:
    """The name of a file; for a model in a run folder, that of the folder.

    >>> called("weights/robust4.pt"), called("runs/robust/model.safetensors")
    ('robust4', 'robust')
    """
    file = Path(path)
    return file.resolve().parent.name if file.name == "model.safetensors" else file.stem


def written(cell: Cell, column: Column) -> str:
    """A cell as text: a dash for None, with its interval if it has one."""
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
    """The columns that are not empty."""
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
    # As text, not as a terminal: a name could contain control sequences.
    console = Console(file=out, width=width or 10_000, force_terminal=False, color_system=None, markup=False)
    console.print(grid)
    lines = [line.rstrip() for line in out.getvalue().rstrip().splitlines()]
    notes = [one_line(note) for note in table.notes]
    notes += [f"not shown, the terminal is too narrow: {absent}"] if absent else []
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _fitted(sides: list[Side], width: int | None) -> tuple[list[Side], str]:
    """Drop spare columns from the right, then intervals, until the table fits; also returns what was dropped."""

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


def _markdown(table: Table, beside: Path | None, role: str) -> str:
    sides = used(table)

    def shown(cell: Cell, column: Column) -> str:
        text = _escaped(written(cell, column))
        if not isinstance(cell, Link) or beside is None:
            return text
        return f"{{{role}}}`{text} <{_way(cell.file, beside)}>`" if role else _linked(text, cell.file, beside)

    def line(cells: list[str]) -> str:
        return f"| {' | '.join(cells)} |"

    head = [line([_escaped(column.head) for column, _ in sides]), "|" + "---|" * len(sides)]
    body = [line([shown(cells[place], column) for column, cells in sides]) for place in range(len(table.rows))]
    return "\n".join([*head, *body, *(f"\n{_escaped(one_line(note))}" for note in table.notes)])


def _latex(table: Table) -> str:
    sides = used(table)
    rows = [[written(cells[place], column) for column, cells in sides] for place in range(len(table.rows))]
    words = [all(cell is None or isinstance(cell, str) for cell in cells) for _, cells in sides]
    return latex_table([one_line(column.head) for column, _ in sides], rows, words, [*map(one_line, table.notes)])


def _linked(text: str, file: Path, beside: Path) -> str:
    """A link from a folder to a file with any name."""
    inside = text.replace("[", "\\[").replace("]", "\\]")
    return f"[{inside}]({quote(os.fsencode(_way(file, beside)))})"


def _way(file: Path, beside: Path) -> str:
    return Path(os.path.relpath(file, beside)).as_posix()


def _escaped(text: str) -> str:
    """Escape what Markdown would read as a cell's end, HTML, code, emphasis or a link."""
    for sign in "\\`*<|":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("](", "]\\(")


def _csv(table: Table) -> str:
    out = io.StringIO()
    head, lines = _values(table)
    rows = [[csv_cell(each) if isinstance(each, str) else each for each in line] for line in lines]
    csv.writer(out, lineterminator="\n").writerows([[csv_cell(each) for each in head], *rows])
    return out.getvalue().rstrip("\n")


def _json(table: Table) -> str:
    head, lines = _values(table)
    found = {"schema": "anchorhold.table/1", **table.about, "notes": table.notes}
    found["rows"] = [dict(zip(head, line)) for line in lines]
    return json.dumps(without_nan(found), indent=2, ensure_ascii=False, allow_nan=False)


def _values(table: Table) -> tuple[list[str], list[list[object]]]:
    """Names of all columns, including those for intervals and means, and the values of each row."""
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
