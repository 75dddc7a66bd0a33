"""Tables inside a Markdown page, written anew from the runs they show.

A page asks for a table by a comment, and `<!-- end -->` says where it ends; what stands between is replaced:

    <!-- compare results/cub --table columns -->
    <!-- end -->

Folders are relative to where the command is given, and links lead from the page to the runs.
"""

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import RunError, SettingsError
from ..record import atomic
from ..settings import check, nearest
from .collect import Entry, collect
from .compare import print_table, runs_table
from .entangled import entanglement
from .protocols import columns_table, strong_table
from .tables import Table, render

__all__ = ["TABLES", "anew", "write_into"]

TABLES: dict[str, Callable[[Sequence[Entry]], Table]] = {
    "runs": runs_table,
    "print": print_table,
    "columns": columns_table,
    "strong": strong_table,
    "entanglement": entanglement,
}
"""Tables of runs by name."""

_BEGIN = re.compile(r"<!-- compare (?P<asked>[^\n]*?) -->[ \t]*")
_END = "<!-- end -->"


def write_into(page: Path, folders: Sequence[Path]) -> tuple[int, tuple[str, ...]]:
    """Write the tables of these folders anew in `page`; how many there were, and what had to be left out of them."""
    try:
        text = page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"cannot read {page}: {error}") from None
    made, count, problems = anew(text, page.parent, folders)
    others = [f"'{found['asked']}'" for line in text.split("\n") if (found := _BEGIN.fullmatch(line))]
    instead = f"it asks for {', '.join(others)}" if others else f"put <!-- compare {folders[0]} --> and {_END} there"
    check(count > 0, f"{page} asks for no table of these folders: {instead}")
    if made != text:
        with atomic(page) as temporary:
            temporary.write_text(made, encoding="utf-8")
    return count, problems


def anew(text: str, beside: Path, folders: Sequence[Path]) -> tuple[str, int, tuple[str, ...]]:
    """The text of a page that lies in `beside` with the tables of these folders made again, and how many they were."""
    lines, count = [], 0
    problems: dict[str, None] = {}
    given = {folder.resolve() for folder in folders}
    waiting = iter(text.split("\n"))
    for line in waiting:
        lines.append(line)
        begin = _BEGIN.fullmatch(line)
        if not begin:
            continue
        old = []
        for inner in waiting:
            if inner.strip() == _END:
                break
            check(not _BEGIN.fullmatch(inner), f"{line} has no {_END} before the next table")
            old.append(inner)
        else:
            check(False, f"{line} has no {_END}")
        asked, table, sort = _asked(begin["asked"])
        if all(given & {folder.resolve(), *folder.resolve().parents} for folder in asked):
            found = collect(asked)
            problems |= dict.fromkeys(found.problems)
            shown = TABLES[table](found.entries)
            made = render(shown.sorted_by(sort) if sort else shown, "markdown", beside=beside)
            old = ["", *made.split("\n"), ""]
            count += 1
        lines += [*old, _END]
    return "\n".join(lines), count, tuple(problems)


def _asked(words: str) -> tuple[list[Path], str, str]:
    """Folders, table and column to sort by, written as on the command line."""
    options = {"--table": "runs", "--sort": ""}
    folders: list[Path] = []
    try:
        parts = iter(shlex.split(words))
    except ValueError as error:
        raise SettingsError(f"<!-- compare {words} --> cannot be read: {error}") from None
    for part in parts:
        if part in options:
            options[part] = next(parts, "")
        else:
            check(not part.startswith("--"), f"<!-- compare {words} --> knows --table and --sort, not {part}")
            folders.append(Path(part))
    check(bool(folders), f"<!-- compare {words} --> names no folder")
    check(options["--table"] in TABLES, f"no table {options['--table']!r}; {nearest(options['--table'], TABLES)}")
    return folders, options["--table"], options["--sort"]
