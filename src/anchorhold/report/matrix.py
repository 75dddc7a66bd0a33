"""Compare runs by two of their settings: a matrix, as in Zhou & Patel 2022, table 2."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..columns import length
from ..errors import RunError, check, nearest
from ..runs.fields import dig
from .collect import Entry
from .methods import LETTERS
from .shifts import DERIVED
from .tables import Cell, Column, Mean, Table, plain
from .values import COLLAPSE, column_of, judged

__all__ = ["check_setting", "leaves", "matrix", "setting_order"]


def matrix(entries: Sequence[Entry], down: str, across: str, values: Sequence[str] = ("r1", "ers")) -> Table:
    """Values of runs by two of their settings, as in Zhou & Patel 2022, table 2; means where several runs share a cell.

    A setting is a defence's (source) or a dotted name (train.seed). A cell whose runs have all collapsed says so.
    """
    for key in (down, across):
        check_setting(entries, key)
    usable = [e for e in entries if e.finished and e.setting(down) is not None and e.setting(across) is not None]
    notes = [f"left out, not finished: {e.name} ({e.status})" for e in entries if not e.finished]
    lacking = [e.name for e in entries if e.finished and e not in usable]
    notes += [f"left out, without {down} or {across}: {', '.join(lacking)}"] if lacking else []
    if not usable:
        raise RunError(f"no finished run has both {down} and {across}; " + (notes or ["train some"])[0])
    cells: dict[tuple[Any, Any], list[Entry]] = {}
    for entry in usable:
        cells.setdefault((entry.setting(down), entry.setting(across)), []).append(entry)
    notes += _mixed(cells.values(), (down, across))
    notes += [f"{value} of older runs is {DERIVED}" for value in values if any(value in e.derived for e in usable)]
    left, top = (sorted({pair[side] for pair in cells}, key=setting_order) for side in (0, 1))
    asked = [(value, column_of(entries, value)) for value in values]
    heads = tuple(
        Column(
            f"{across}={_word(b)} {c.key}", _label(across, b, usable) + (f" {c.head}" if asked[1:] else ""), c.digits
        )
        for b in top
        for _, c in asked
    )
    rows = tuple(
        (
            _label(down, a, usable),
            *(_mean([judged(e, value) for e in cells.get((a, b), [])]) for b in top for value, _ in asked),
        )
        for a in left
    )
    known = [c.head for value, c in asked if any(judged(e, value) is not None for e in usable)]
    says = f"rows: {down}, columns: {across}; {', '.join(known)}"
    several = any(len(group) > 1 for group in cells.values())
    notes = [says + ("; means, with the number of runs" if several else ""), *notes]
    return Table((Column(down, f"{down} \\ {across}"), *heads), rows, tuple(notes))


def check_setting(entries: Sequence[Entry], key: str) -> None:
    trees = [dig(entry.info, "settings") for entry in entries if entry.info]
    dotted = {name for tree in trees for name, _ in leaves(tree)}
    known = dotted | {name.removeprefix("defence.") for name in dotted if name.startswith("defence.")}
    check(key in known, f"no run has a setting {key!r}; {nearest(key, known)}")


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items() if isinstance(tree, Mapping) else ():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _mixed(groups: Any, keys: tuple[str, str]) -> list[str]:
    """A note where means are over runs that differ in more than the seed."""
    chosen = {key if "." in key else f"defence.{key}" for key in keys} | {"train.seed", "data.root", "recipe"}
    differing: set[str] = set()
    for group in groups:
        settings = [dict(leaves(dig(entry.info, "settings"))) for entry in group]
        names = {name for each in settings for name in each} - chosen
        differing |= {name for name in names if len({repr(each.get(name)) for each in settings}) > 1}
    return [f"some means are over runs that differ in {', '.join(sorted(differing))}"] if differing else []


def setting_order(value: Any) -> tuple[int, float, str]:
    """The order of settings: numbers by size, samplers as in the papers, then other words."""
    if isinstance(value, int | float):
        return 0, float(value), ""
    words = list(LETTERS)
    return (1, float(words.index(value)), "") if value in words else (2, 0.0, str(value))


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _label(setting: str, value: Any, entries: Sequence[Entry]) -> str:
    """A value of a setting as text; ε and α as N/255 where that is exact, unless the runs have another norm."""
    section, _, name = setting.rpartition(".")
    if name not in ("eps", "alpha") or not isinstance(value, int | float):
        return _word(value)
    norms = {str(entry.setting(f"{section or 'defence'}.norm") or "linf") for entry in entries}
    return length(value, "linf" if "linf" in norms else "l2")


def _mean(cells: Sequence[Cell]) -> Cell:
    """The mean of the numbers; without any, COLLAPSE if a run collapsed."""
    known = [plain(cell) for cell in cells if cell is not None and not isinstance(cell, str)]
    if known:
        return Mean(sum(known) / len(known), len(known), len(cells))
    collapsed = sum(cell == COLLAPSE for cell in cells)
    return None if not collapsed else COLLAPSE if len(cells) == 1 else f"{COLLAPSE} ({collapsed})"
