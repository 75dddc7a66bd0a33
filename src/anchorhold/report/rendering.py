"""Tables in five formats: text for the terminal, Markdown, LaTeX, CSV, JSON.

Text, Markdown and LaTeX round, omit empty columns, and end with notes; Markdown has links. CSV and JSON have every
column, hidden ones too, and every digit, with extra columns for the ends of intervals and the number of runs behind a
mean. JSON also has the settings and versions if one command made all rows.
"""

import csv
import io
import json
import os
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from ..errors import check, nearest
from ..runs.folder import without_nan
from ..runs.writing import csv_cell
from .latex import latex_table
from .tables import Cell, Column, Link, Side, Table, in_full, notes_of, one_line, shortened, used, written

__all__ = ["check_format", "render"]

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
    notes = notes_of(table, sides)
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
    return "\n".join([*head, *body, *(f"\n{_escaped(note)}" for note in notes_of(table, sides))])


def _latex(table: Table) -> str:
    sides = used(table)
    rows = [[written(cells[place], column) for column, cells in sides] for place in range(len(table.rows))]
    words = [all(cell is None or isinstance(cell, str) for cell in cells) for _, cells in sides]
    return latex_table([one_line(column.head) for column, _ in sides], rows, words, notes_of(table, sides))


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
    head, lines = in_full(table)
    rows = [[csv_cell(each) if isinstance(each, str) else each for each in line] for line in lines]
    csv.writer(out, lineterminator="\n").writerows([[csv_cell(each) for each in head], *rows])
    return out.getvalue().rstrip("\n")


def _json(table: Table) -> str:
    head, lines = in_full(table)
    found = {"schema": "anchorhold.table/1", **table.about, "notes": notes_of(table, used(table))}
    found["rows"] = [dict(zip(head, line)) for line in lines]
    return json.dumps(without_nan(found), indent=2, ensure_ascii=False, allow_nan=False)
