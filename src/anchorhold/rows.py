"""Print as data: the published rows of the four papers, by name, with the settings that train them.

`recipes/print.csv` holds what the tables print, empty where they print nothing. A row is named
paper/table/data set/method-steps; one that several tables print has all of them in `tables` and answers to each.
"""

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from .errors import SettingsError
from .layers import parse_assignments
from .settings import Settings, check, nearest

__all__ = ["Row", "check_row", "row_named", "row_settings", "rows"]

_WORDS = ("row", "paper", "table", "data", "method", "recipe", "overrides", "note")


@dataclass(frozen=True)
class Row:
    """One row of a table. `printed` has its numbers by column, `steps` (η) and `init` among them.

    `init` is the ε, in 1/255, that the weights were trained against before the row was: 0 is plain ImageNet.
    """

    id: str
    paper: str
    tables: tuple[str, ...]
    data: str
    method: str
    recipe: str
    overrides: tuple[str, ...]
    printed: Mapping[str, float]
    note: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """What it is called, table by table; `id` is one of them."""
        return tuple("/".join((self.paper, table, *self.id.split("/")[2:])) for table in self.tables)


@cache
def rows() -> tuple[Row, ...]:
    """Every published row, in the order of papers and tables."""
    text = resources.files("anchorhold").joinpath("recipes", "print.csv").read_text(encoding="utf-8")
    return tuple(_row(line) for line in csv.DictReader(text.splitlines()))


def _row(line: Mapping[str, str]) -> Row:
    return Row(
        id=line["row"],
        paper=line["paper"],
        tables=tuple(line["table"].split()),
        data=line["data"],
        method=line["method"],
        recipe=line["recipe"],
        overrides=tuple(filter(None, line["overrides"].split(";"))),
        printed={name: float(cell) for name, cell in line.items() if cell and name not in _WORDS},
        note=line["note"],
    )


def row_named(name: str) -> Row:
    """The row of that name.

    >>> row_named("001/t5/cub/hm-lga-ics-8").id  # tables 5 and 6 print it
    '001/t6/cub/hm-lga-ics-8'
    """
    known = {each: row for row in rows() for each in row.names}
    if name not in known:
        raise SettingsError(f"no row {name!r}; {nearest(name, known, '`anchorhold recipes rows` lists them')}")
    return known[name]


def row_settings(row: Row, changes: Iterable[str] = ()) -> dict[str, Any]:
    """What the row lays over its recipe, as the nested dict that `settings_from` takes; `changes` win over it.

    >>> row_settings(row_named("001/t6/cub/hm-lga-32"), ["train.epochs=3"])
    {'defence': {'steps': '32'}, 'train': {'epochs': '3'}}
    """
    return parse_assignments((*row.overrides, *changes))


def check_row(row: Row, settings: Settings) -> None:
    """Refuse settings that name another published data set, or that start where the row did not.

    A set that has no print, such as a folder, may borrow a row's method.
    """
    data = settings.data.name
    check(
        data == row.data or data not in {each.data for each in rows()},
        f"{row.id} is a row of {row.data}, not of {data}: train on {row.data}, or take --recipe {row.recipe}",
    )
    check(
        not row.printed.get("init") or settings.model.weights != "imagenet",
        "print started from adversarially trained weights; give yours with --weights "
        f"({row.id} had ε = {row.printed.get('init', 0):g}/255)",
    )
