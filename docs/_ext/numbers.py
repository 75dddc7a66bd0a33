"""Numbers and files of the repository on the pages of the site.

{num}`results/cub/hm-lga/audit.json:published.ers.value|.1f` is a number of a JSON file, read when the site is built:
the file, the place in it, and how to write it (Python's format). Parts of a place are parted by dots. A part that is a
number is a position in a list. A key that contains a dot, a bar or a colon stands in double quotes.

{published}`hm/t6/cub/hm-lga-8:ERS` is a number of a paper, verbatim from src/anchorhold/reproduce/published.csv: a name
of the row, and the column.

{repo}`results/cub/hm-lga/audit.json` links to a file or a folder of the repository.

A file outside the repository, or a file, a place, a row or a format that does not exist, is an error: the build fails.
"""

import csv
import json
import math
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import SphinxError
from sphinx.util import logging
from sphinx.util.docutils import SphinxRole

__all__ = ["PUBLISHED", "Unfilled", "filled", "published", "setup", "value_at"]

PUBLISHED = "src/anchorhold/reproduce/published.csv"

_PART = re.compile(r'"([^"]+)"|([^."]+)')
_FORMAT = re.compile(r"\+?,?(?:d|\.\d[feg%])")
_SHORT = re.compile(r"\.\d\d?")  # of a text, such as a commit: its first letters
_log = logging.getLogger(__name__)


class Unfilled(ValueError):
    """What the text asks for is not there."""


@lru_cache(maxsize=256)
def _read(path: Path, changed: int) -> Any:
    """The JSON of a file; `changed` is the time of its last change, so that a live server reads it again."""
    return json.loads(path.read_text(encoding="utf-8"))


def _parts(place: str) -> list[str]:
    parts: list[str] = []
    end = 0
    for found in _PART.finditer(place):
        if place[end : found.start()] != ("." if parts else ""):
            break
        parts.append(found[1] or found[2])
        end = found.end()
    if not parts or end != len(place):
        raise Unfilled(f'the place {place!r} cannot be read; write key.key.0 or key."key.with.dots"')
    return parts


def value_at(tree: Any, place: str) -> Any:
    """The value at a dotted place of a JSON tree.

    >>> value_at({"a": [{"b.c": 1.5}]}, 'a.0."b.c"')
    1.5
    """
    for part in _parts(place):
        if isinstance(tree, list):
            if not part.isdecimal() or int(part) >= len(tree):
                raise Unfilled(f"{part} of {place} is no position in a list of {len(tree)}")
            tree = tree[int(part)]
        elif isinstance(tree, dict):
            if part not in tree:
                raise Unfilled(f"{part} of {place} is not there; there are {', '.join(list(tree)[:12])}")
            tree = tree[part]
        else:
            raise Unfilled(f"{part} of {place} cannot be there: the value before it is {tree!r}")
    return tree


def _within(path: Path, root: Path) -> bool:
    """Whether a path is in the repository, links followed."""
    return root.resolve() in [path.resolve(), *path.resolve().parents]


def filled(text: str, root: Path) -> tuple[str, Path]:
    """What {num} writes for its text, and the file it was read from."""
    file, colon, rest = text.partition(":")
    place, bar, form = rest.rpartition("|")
    if not colon or not bar or not place or not form:
        raise Unfilled("write file.json:place|format, such as results/demo/seed-0.json:natural.clean|.1f")
    path = root / file.strip()
    if not path.is_file() or not _within(path, root):
        raise Unfilled(f"there is no file {file.strip()} in the repository")
    try:
        tree = _read(path, path.stat().st_mtime_ns)
    except ValueError as error:
        raise Unfilled(f"{file} is no JSON: {error}") from None
    value = value_at(tree, place.strip())
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise Unfilled(f"{place} is {str(value)[:60]}, which is neither a number nor a text")
    if not (_SHORT if isinstance(value, str) else _FORMAT).fullmatch(form.strip()):
        raise Unfilled(f"{form.strip()!r} is no format of {value!r}; write d, .1f, +.1f or ,d, and .7 for a text")
    if isinstance(value, float) and not math.isfinite(value):
        raise Unfilled(f"{place} is {value}")
    try:
        return format(value, form.strip()), path
    except ValueError as error:
        raise Unfilled(f"{value!r} cannot be written as {form.strip()!r}: {error}") from None


@lru_cache(maxsize=4)
def _rows(path: Path, changed: int) -> dict[str, dict[str, str]]:
    """The published rows with the text of their cells, by all their names: one for each table."""
    lines = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    return {
        "/".join((line["paper"], table, *line["row"].split("/")[2:])): line
        for line in lines
        for table in line["table"].split()
    }


def published(text: str, root: Path) -> tuple[str, Path]:
    """What {published} writes for its text, the number as it is printed, and the file it was read from."""
    name, colon, column = (part.strip() for part in text.partition(":"))
    if not colon or not name or not column:
        raise Unfilled("write row:column, such as hm/t6/cub/hm-lga-8:R@1")
    path = root / PUBLISHED
    if not path.is_file():
        raise Unfilled(f"there is no file {PUBLISHED} in the repository")
    found = _rows(path, path.stat().st_mtime_ns).get(name)
    if found is None:
        raise Unfilled(f"there is no published row {name}; `anchorhold recipes rows` lists them")
    cell = found.get(column, "")
    try:
        float(cell)
    except ValueError:
        numbers = [key for key, each in found.items() if re.fullmatch(r"[\d.]+", each)]
        raise Unfilled(f"{name} has no number {column}; it has {', '.join(numbers)}") from None
    return cell, path


class _Role(SphinxRole):
    def root(self) -> Path:
        return Path(self.config.repository_root or Path(self.env.app.confdir).parent)

    def missing(self, problem: str) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        self.env.app.repository_problems.append(problem)  # type: ignore[attr-defined]
        _log.error("{%s}`%s`: %s", self.name, self.text, problem, location=self.get_location())
        return [nodes.problematic(self.rawtext, "?")], []


class Number(_Role):
    """{num}`file.json:place|format`."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        try:
            text, path = filled(self.text, self.root())
        except Unfilled as error:
            return self.missing(str(error))
        self.env.note_dependency(str(path))
        return [nodes.inline(self.rawtext, text, classes=["num"], title=self.text)], []


class Published(_Role):
    """{published}`row:column`."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        try:
            text, path = published(self.text, self.root())
        except Unfilled as error:
            return self.missing(str(error))
        self.env.note_dependency(str(path))
        return [nodes.inline(self.rawtext, text, classes=["num"], title=f"published: {self.text}")], []


class Repository(_Role):
    """{repo}`path` or {repo}`text <path>`: a link to a file or a folder of the repository."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        told = re.fullmatch(r"(?s)(.+?)\s*<([^<>]+)>", self.text)
        text, path = (told[1], told[2]) if told else (self.text, self.text)
        name, _, anchor = path.strip().partition("#")
        place = self.root() / name
        if not place.exists() or not _within(place, self.root()):
            return self.missing(f"there is no file {name} in the repository")
        kind = "tree" if place.is_dir() else "blob"
        address = f"{self.config.repository_url}/{kind}/{self.config.repository_branch}/{name.rstrip('/')}"
        label: nodes.Node = nodes.Text(text) if told else nodes.literal(text, text)
        link = nodes.reference(self.rawtext, "", label, refuri=address + (f"#{anchor}" if anchor else ""))
        return [link], []


def _begin(app: Sphinx) -> None:
    app.repository_problems = []  # type: ignore[attr-defined]


def _end(app: Sphinx, exception: Exception | None) -> None:
    """Fail without -W too."""
    problems = app.repository_problems  # type: ignore[attr-defined]
    if problems and exception is None:
        raise SphinxError(f"{len(problems)} numbers or files are not there; the first: {problems[0]}")


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_config_value("repository_root", "", "env", str)
    app.add_config_value("repository_url", "", "env", str)
    app.add_config_value("repository_branch", "main", "env", str)
    app.add_role("num", Number())
    app.add_role("published", Published())
    app.add_role("repo", Repository())
    app.connect("builder-inited", _begin)
    app.connect("build-finished", _end)
    return {"version": "1", "parallel_read_safe": False, "parallel_write_safe": True}
