"""Tables of runs: columns, cells with intervals, notes; `rendering` writes them in every format."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..columns import length
from ..errors import check, nearest

__all__ = [
    "Cell",
    "Column",
    "ColumnNote",
    "Estimate",
    "Link",
    "Mean",
    "Note",
    "Radius",
    "Side",
    "Table",
    "called",
    "in_full",
    "notes_of",
    "one_line",
    "plain",
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


class Radius(float):
    """An ε or a step, and its norm."""

    norm: str

    def __new__(cls, size: float, norm: str) -> "Radius":
        radius = super().__new__(cls, size)
        radius.norm = norm
        return radius


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
    hidden: bool = False  # only in CSV and JSON, unless `only` asks for it


Side = tuple[Column, list[Cell]]  # a column with its cells
Note = str | Callable[[Sequence[Side]], str]  # a text, or what makes it from the columns shown; "" is none


@dataclass(frozen=True)
class ColumnNote:
    """A note on one column, left out where it is not shown."""

    key: str
    text: str

    def __call__(self, sides: Sequence[Side]) -> str:
        return self.text if any(column.key == self.key for column, _ in sides) else ""


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns, and notes."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[Note, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)  # settings, versions and commit of all rows

    def sorted_by(self, key: str) -> "Table":
        """Sorted by one column of the CSV: names ascending, numbers descending, missing values last."""
        names, lines = in_full(self)
        check(key in names, f"there is no column {key!r} to sort by; {nearest(key, names)}")
        place = names.index(key)

        def rank(row: int) -> tuple[int, float, str]:
            value = lines[row][place]
            if isinstance(value, int | float):
                return 0, -float(value), ""
            return (2, 0.0, "") if value is None else (1, 0.0, str(value))

        return replace(self, rows=tuple(self.rows[row] for row in sorted(range(len(lines)), key=rank)))

    def only(self, keys: Sequence[str]) -> "Table":
        """With these columns of the CSV alone, in this order.

        The first column, which names the rows, is kept in front. The end of an interval brings its whole column. A note
        names the columns without values, which text leaves out.
        """
        owners: dict[str, int] = {}
        for place, (column, cells) in enumerate(_sides(self)):
            owners |= {column.key + ending: place for ending in _parts(cells)}
        for key in keys:
            check(key in owners, f"there is no column {key!r}; {nearest(key, owners)}")
        places = list(dict.fromkeys([0, *(owners[key] for key in keys)]))
        rows = tuple(tuple(row[place] for place in places) for row in self.rows)
        chosen = replace(self, columns=tuple(replace(self.columns[place], hidden=False) for place in places), rows=rows)
        empty = [column.key for column, cells in _sides(chosen) if all(cell is None for cell in cells)]
        note = (f"no run here has a value for {', '.join(empty)}",) if empty and rows else ()
        return replace(chosen, notes=(*self.notes, *note))


def plain(cell: float | Estimate | Mean) -> float:
    """The number itself."""
    return cell if isinstance(cell, int | float) else cell.value


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
    if isinstance(cell, Radius):
        return length(cell, cell.norm)
    number = f"{plain(cell):{',' if column.thousands else ''}.{column.digits}f}"
    if isinstance(cell, Mean) and cell.total > 1:
        return f"{number} ({cell.count if cell.count == cell.total else f'{cell.count} of {cell.total}'})"
    if isinstance(cell, Estimate) and column.span and cell.low is not None and cell.high is not None:
        return f"{number} [{cell.low:.{column.digits}f}, {cell.high:.{column.digits}f}]"
    return number


def _sides(table: Table) -> list[Side]:
    return [(column, [row[place] for row in table.rows]) for place, column in enumerate(table.columns)]


def used(table: Table) -> list[Side]:
    """The columns that are not empty, without hidden ones."""
    sides = ((column, cells) for column, cells in _sides(table) if not column.hidden)
    return [(column, cells) for column, cells in sides if any(cell is not None for cell in cells)]


def notes_of(table: Table, sides: Sequence[Side]) -> list[str]:
    """The notes on the columns that are shown, each on one line."""
    notes = (note if isinstance(note, str) else note(sides) for note in table.notes)
    return [one_line(note) for note in notes if note]


def _parts(cells: Sequence[Cell]) -> dict[str, Callable[[Cell], object]]:
    """What the CSV has of a column: the value, and the ends of intervals or the number of runs behind a mean."""
    parts: dict[str, Callable[[Cell], object]] = {"": _bare}
    if any(isinstance(cell, Estimate) for cell in cells):
        parts["_low"] = lambda cell: cell.low if isinstance(cell, Estimate) else None
        parts["_high"] = lambda cell: cell.high if isinstance(cell, Estimate) else None
    if any(isinstance(cell, Mean) for cell in cells):
        parts["_runs"] = lambda cell: cell.count if isinstance(cell, Mean) else None
    return parts


def _bare(cell: Cell) -> object:
    return one_line(cell) if isinstance(cell, str) else None if cell is None else plain(cell)


def in_full(table: Table) -> tuple[list[str], list[list[object]]]:
    """Names of all columns, including those for intervals and means, and the values of each row."""
    head: list[str] = []
    lines: list[list[object]] = [[] for _ in table.rows]
    for column, cells in _sides(table):
        for ending, part in _parts(cells).items():
            head.append(one_line(column.key + ending))
            for line, cell in zip(lines, cells):
                line.append(part(cell))
    return head, lines
