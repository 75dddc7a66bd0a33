"""The published rows of the four papers, by name, with the settings that train them.

`reproduce/published.csv` has the papers' numbers verbatim, with empty cells where they give none. A row is named
paper/table/data set/method-steps. A row in several tables lists all of them in `tables` and has a name for each.
"""

import csv
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from ..config.recipes import parse_assignments
from ..config.settings import Settings
from ..errors import SettingsError, check, nearest
from ..interface import option

__all__ = ["Row", "check_row", "published_on", "row_named", "row_settings", "rows"]

_WORDS = ("row", "paper", "table", "data", "method", "recipe", "overrides", "note")


@dataclass(frozen=True)
class Row:
    """One row of a table. `published` has its numbers by column, `steps` (η) and `init` among them.

    `init` is the ε, in 1/255, that the initial weights were trained against; 0 is plain ImageNet.
    """

    id: str
    paper: str
    tables: tuple[str, ...]
    data: str
    method: str
    recipe: str
    overrides: tuple[str, ...]
    published: Mapping[str, float]
    note: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Its names, one per table; `id` is one of them."""
        return tuple("/".join((self.paper, table, *self.id.split("/")[2:])) for table in self.tables)


@cache
def rows() -> tuple[Row, ...]:
    """Every published row, in the order of papers and tables."""
    text = resources.files("anchorhold").joinpath("reproduce", "published.csv").read_text(encoding="utf-8")
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
        published={name: float(cell) for name, cell in line.items() if cell and name not in _WORDS},
        note=line["note"],
    )


def published_on(data: Collection[str]) -> list[Row]:
    """The rows on these data sets that have both R@1 and ERS."""
    return [row for row in rows() if row.data in data and {"R@1", "ERS"} <= {*row.published}]


def row_named(name: str) -> Row:
    """The row of that name.

    >>> row_named("hm/t5/cub/hm-lga-ics-8").id  # it is in tables 5 and 6
    'hm/t6/cub/hm-lga-ics-8'
    """
    known = {each: row for row in rows() for each in row.names}
    if name not in known:
        raise SettingsError(f"no row {name!r}; {nearest(name, known, '`anchorhold recipes rows` lists them')}")
    return known[name]


def row_settings(row: Row, changes: Iterable[str] = ()) -> dict[str, Any]:
    """The row's changes to its recipe, as the nested dict that `settings_from` takes; `changes` override them.

    >>> row_settings(row_named("hm/t6/cub/hm-lga-32"), ["train.epochs=3"])
    {'defence': {'steps': '32'}, 'train': {'epochs': '3'}}
    """
    return parse_assignments((*row.overrides, *changes))


def check_row(row: Row, settings: Settings) -> None:
    """Refuse settings with another published data set, or with plain weights where the row has robust ones.

    Other data, such as a folder, may use a row's method.
    """
    data = settings.data.name
    check(
        data == row.data or data not in {each.data for each in rows()},
        f"{row.id} is a row for {row.data}, not {data}: train on {row.data}, or use {option('recipe', row.recipe)}",
    )
    check(
        not row.published.get("init") or settings.model.weights != "imagenet",
        f"the paper starts from adversarially trained weights; give yours with {option('weights')} "
        f"({row.id} had ε = {row.published.get('init', 0):g}/255)",
    )
