"""Tables inside a Markdown page, regenerated from runs.

A comment in the page requests a table, and `<!-- end -->` ends it; the lines between are replaced:

    <!-- compare results/cub --table columns -->
    <!-- end -->

Folders are relative to the working directory. Links lead from the page to the runs. With `--links ROLE` they are
written as a role of Sphinx, {ROLE}`name <path>`, with paths from the working directory.
"""

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import RunError, SettingsError, check, nearest
from ..runs.files import regular
from ..runs.writing import atomic
from .collect import Entry, collect
from .compare import epsilon_table, published_table, reproduced_table, runs_table
from .entangled import entanglement
from .protocols import columns_table, strong_table
from .rendering import render
from .tables import Table

__all__ = ["TABLES", "regenerated", "write_into"]

TABLES: dict[str, Callable[[Sequence[Entry]], Table]] = {
    "runs": runs_table,
    "published": published_table,
    "reproduced": reproduced_table,
    "columns": columns_table,
    "strong": strong_table,
    "epsilon": epsilon_table,
    "entanglement": entanglement,
}
"""Tables of runs by name."""

_BEGIN = re.compile(r"<!-- compare (?P<asked>[^\n]*?) -->[ \t]*")
_END = "<!-- end -->"


def write_into(page: Path, folders: Sequence[Path]) -> tuple[int, tuple[str, ...]]:
    """Regenerate the tables of these folders in `page`; returns their number and what was left out.

    `page` may be a folder: then it is done for every Markdown page in it that has such a table. A page that would stay
    the same is not written. Every page is read before one is written.
    """
    pages = sorted(page.glob("*.md")) if page.is_dir() else [page]
    texts = {each: _read(each) for each in pages}
    made = {each: regenerated(text, each.parent, folders) for each, text in texts.items()}
    count = sum(tables for _, tables, _ in made.values())
    if page.is_dir():
        todo = f"add <!-- compare {folders[0]} --> and {_END}"
        check(count > 0, f"no page in {page} has a table of these folders: {todo}")
    else:
        check(count > 0, f"{page} has no table of these folders: {_others(texts[page], folders)}")
    for each, (text, _, _) in made.items():
        if text != texts[each]:
            with atomic(each) as temporary:
                temporary.write_text(text, encoding="utf-8")
    return count, tuple(dict.fromkeys(problem for _, _, problems in made.values() for problem in problems))


def _read(page: Path) -> str:
    try:
        return regular(page).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"cannot read {page}: {error}") from None


def _others(text: str, folders: Sequence[Path]) -> str:
    """What a page without a table of these folders has instead, or needs."""
    others = [f"'{found['asked']}'" for line in text.split("\n") if (found := _BEGIN.fullmatch(line))]
    return f"it has {', '.join(others)}" if others else f"add <!-- compare {folders[0]} --> and {_END}"


def regenerated(text: str, beside: Path, folders: Sequence[Path]) -> tuple[str, int, tuple[str, ...]]:
    """The text of a page in the folder `beside` with regenerated tables, their number, and problems."""
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
        asked, table, sort, role = _asked(begin["asked"])
        if all(given & {folder.resolve(), *folder.resolve().parents} for folder in asked):
            found = collect(asked)
            problems |= dict.fromkeys(found.problems)
            shown = TABLES[table](found.entries)
            shown = shown.sorted_by(sort) if sort else shown
            made = render(shown, "markdown", beside=Path() if role else beside, role=role)
            old = ["", *made.split("\n"), ""]
            count += 1
        lines += [*old, _END]
    return "\n".join(lines), count, tuple(problems)


def _asked(words: str) -> tuple[list[Path], str, str, str]:
    """Folders, table, sort column and role of links, parsed like a command line."""
    options = {"--table": "runs", "--sort": "", "--links": ""}
    folders: list[Path] = []
    try:
        parts = iter(shlex.split(words))
    except ValueError as error:
        raise SettingsError(f"<!-- compare {words} --> cannot be read: {error}") from None
    for part in parts:
        if part in options:
            options[part] = next(parts, "")
        else:
            check(
                not part.startswith("--"), f"<!-- compare {words} --> accepts --table, --sort and --links, not {part}"
            )
            folders.append(Path(part))
    check(bool(folders), f"<!-- compare {words} --> names no folder")
    check(options["--table"] in TABLES, f"no table {options['--table']!r}; {nearest(options['--table'], TABLES)}")
    return folders, options["--table"], options["--sort"], options["--links"]
