"""Runs side by side: a line for each, a matrix of two settings, and how entangled their classes are.

`VALUES` says what can be asked of a run. ERS comes in both protocols; ARS as print computes it (published, from
print's constants) and from what was measured (corrected).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import RunError
from ..settings import check, nearest
from .collect import Entry, dig, number
from .methods import LETTERS, method_of
from .tables import Cell, Column, Estimate, Mean, Table, plain

__all__ = [
    "COLLAPSE",
    "VALUES",
    "check_setting",
    "column_of",
    "entanglement",
    "judged",
    "leaves",
    "matrix",
    "runs_table",
    "setting_order",
    "value_of",
]

COLLAPSE = "collapse"
SHORT = {"ers": "ers_published", "ars": "ars_published"}  # as in print, which the matrices are compared with


@dataclass(frozen=True)
class Value:
    """Something that can be asked of a run."""

    column: Column
    of: Callable[[Entry], Cell]


def _clean(printed: str, logged: str) -> Callable[[Entry], Cell]:
    """From the end of the training, or where there was none from the audit."""

    def of(entry: Entry) -> Cell:
        known = entry.last(logged)
        return number(dig(entry.audit, "clean", printed, "value")) if known is None else known

    return of


def _score(protocol: str, *place: str) -> Callable[[Entry], Cell]:
    """A score with its interval; a collapsed model has none worth the name, since ERS rates it at about 30."""

    def of(entry: Entry) -> Cell:
        if entry.collapsed:
            return COLLAPSE
        found = dig(entry.audit, "protocols", protocol, *place)
        value = number(dig(found, "value"))
        return None if value is None else Estimate(value, number(dig(found, "low")), number(dig(found, "high")))

    return of


def _value(key: str, head: str, of: Callable[[Entry], Cell], digits: int = 1, **look: bool) -> Value:
    return Value(Column(key, head, digits, **look), of)


VALUES: dict[str, Value] = {
    value.column.key: value
    for value in (
        _value("r1", "R@1", _clean("R@1", "r1")),
        _value("r2", "R@2", _clean("R@2", "r2"), spare=True),
        _value("map_r", "mAP@R", _clean("mAP@R", "map_r"), spare=True),
        _value("ers_published", "ERS publ.", _score("published", "ers")),
        _value("ers_corrected", "ERS corr.", _score("corrected", "ers")),
        _value("ars_published", "ARS publ.", _score("published", "ars", "constants"), span=False, spare=True),
        _value("ars_corrected", "ARS corr.", _score("corrected", "ars", "measured"), span=False, spare=True),
        _value(
            "seconds",
            "seconds",
            lambda e: number(e.info.get("seconds")) or e.last("seconds"),
            0,
            thousands=True,
            spare=True,
        ),
        _value(
            "image_steps", "image-steps", lambda e: number(e.info.get("image_steps")), 0, thousands=True, spare=True
        ),
    )
}

_ABOUT = (
    _value("name", "run", lambda e: e.name),
    _value("method", "method", lambda e: method_of(dig(e.info, "settings", "defence")) if e.info else None),
    _value("steps", "η", lambda e: number(e.setting("steps")), 0),
    _value("data", "data", lambda e: dig(e.info, "data", "name") or dig(e.audit, "data", "query", "name")),
    _value("epochs", "epochs", lambda e: e.epoch, 0, spare=True),
    _value("seed", "seed", lambda e: number(e.setting("train.seed")), 0, spare=True),
)


def runs_table(entries: Sequence[Entry]) -> Table:
    """One line for each run: what it is, how good, how robust, what it took, how it ended."""
    values = (*_ABOUT, *VALUES.values(), _value("status", "status", lambda e: e.status))
    rows = tuple(tuple(value.of(entry) for value in values) for entry in entries)
    return Table(tuple(value.column for value in values), rows, tuple(_notes(entries)))


def _notes(entries: Sequence[Entry]) -> Iterator[str]:
    audited = [entry for entry in entries if entry.audit]
    if audited:
        yield "R@1 to ARS in %; [95 % intervals over queries]"
    attacks = {_attack(entry.audit or {}): entry.name for entry in reversed(audited)}
    if len(attacks) > 1:
        each = "; ".join(f"{attack} ({name})" for attack, name in sorted(attacks.items()))
        yield f"the audits attack differently, so their scores cannot be compared: {each}"


def _attack(audit: Mapping[str, Any]) -> str:
    """How an audit attacks."""
    eps, alpha = (number(dig(audit, "settings", key)) or 0.0 for key in ("eps", "alpha"))
    steps, method = (dig(audit, "settings", key) for key in ("steps", "method"))
    return f"{method} with ε {255 * eps:.4g}/255, {steps} steps of {255 * alpha:.4g}/255"


def value_of(entry: Entry, key: str) -> Cell:
    """A value by its key: one of `VALUES`, or the last of any column of metrics.jsonl."""
    key = SHORT.get(key, key)
    return VALUES[key].of(entry) if key in VALUES else entry.last(key)


def column_of(entries: Sequence[Entry], key: str) -> Column:
    """How a value is written; one that no run has is refused."""
    key = SHORT.get(key, key)
    if key in VALUES:
        return VALUES[key].column
    logged = {name for entry in entries for row in entry.rows for name in row}
    known = {*VALUES, *SHORT, *logged}
    check(key in logged, f"no run has a value {key!r}; {nearest(key, known)}")
    return Column(key, key, 3)


# Two settings -----------------------------------------------------------------------------------------------


def matrix(entries: Sequence[Entry], down: str, across: str, values: Sequence[str] = ("r1", "ers")) -> Table:
    """Values of runs by two of their settings, as table 2 of 001 and A1 of 000 have it; several in a cell: the mean.

    A setting is one of the defence (source) or dotted (train.seed). A cell whose runs have all collapsed says so.
    """
    for key in (down, across):
        check_setting(entries, key)
    usable = [e for e in entries if e.finished and e.setting(down) is not None and e.setting(across) is not None]
    notes = [f"left out, since it is not finished: {e.name} ({e.status})" for e in entries if not e.finished]
    lacking = [e.name for e in entries if e.finished and e not in usable]
    notes += [f"left out, since they lack {down} or {across}: {', '.join(lacking)}"] if lacking else []
    if not usable:
        raise RunError(f"no finished run has both {down} and {across}; " + (notes or ["train some"])[0])
    cells: dict[tuple[Any, Any], list[Entry]] = {}
    for entry in usable:
        cells.setdefault((entry.setting(down), entry.setting(across)), []).append(entry)
    notes += _mixed(cells.values(), (down, across))
    left, top = (sorted({pair[side] for pair in cells}, key=setting_order) for side in (0, 1))
    asked = [(value, column_of(entries, value)) for value in values]
    heads = tuple(
        Column(f"{across}={_word(b)} {c.key}", _word(b) + (f" {c.head}" if len(asked) > 1 else ""), c.digits)
        for b in top
        for _, c in asked
    )
    rows = tuple(
        (_word(a), *(_mean([judged(e, value) for e in cells.get((a, b), [])]) for b in top for value, _ in asked))
        for a in left
    )
    says = f"{down} down, {across} across; {', '.join(column.head for _, column in asked)}"
    several = any(len(group) > 1 for group in cells.values())
    notes = [says + ("; means, with the number of runs" if several else ""), *notes]
    return Table((Column(down, f"{down} \\ {across}"), *heads), rows, tuple(notes))


def judged(entry: Entry, value: str) -> Cell:
    """A value where runs are judged by it: of a model that has collapsed, that it has."""
    return COLLAPSE if entry.collapsed else value_of(entry, value)


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
    """A mean over runs that differ in more than the seed has to be said."""
    chosen = {key if "." in key else f"defence.{key}" for key in keys} | {"train.seed", "data.root", "recipe"}
    differing: set[str] = set()
    for group in groups:
        settings = [dict(leaves(dig(entry.info, "settings"))) for entry in group]
        names = {name for each in settings for name in each} - chosen
        differing |= {name for name in names if len({repr(each.get(name)) for each in settings}) > 1}
    return [f"some means are over runs that differ in {', '.join(sorted(differing))}"] if differing else []


def setting_order(value: Any) -> tuple[int, float, str]:
    """Numbers by size, samplers as the papers list them, then other words."""
    if isinstance(value, int | float):
        return 0, float(value), ""
    words = list(LETTERS)
    return (1, float(words.index(value)), "") if value in words else (2, 0.0, str(value))


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _mean(cells: Sequence[Cell]) -> Cell:
    """The mean of what is a number; with none of those, a collapse where there was one."""
    known = [plain(cell) for cell in cells if cell is not None and not isinstance(cell, str)]
    if known:
        return Mean(sum(known) / len(known), len(known), len(cells))
    collapsed = sum(cell == COLLAPSE for cell in cells)
    return None if not collapsed else COLLAPSE if len(cells) == 1 else f"{COLLAPSE} ({collapsed})"


# Entanglement -----------------------------------------------------------------------------------------------


def entanglement(entries: Sequence[Entry]) -> Table:
    """Distances between and within classes and their ratio d_intra / d_inter (002 table 5), at the end of each run.

    Made from the logged columns `inter_distance` and `intra_distance` where a run has them. Else from the mean
    distance d̄ over all pairs of a clean batch (`mean_distance`) and the separability s = (d_inter − d_intra) / d̄:
    nearly all pairs are of two classes, so d̄ stands for d_inter and d̄·(1 − s) for d_intra. With a share q of pairs
    within a class (1 % on CUB, a fifth on digits) both are too small, by q·s·d̄, and where s ≥ 1 nothing can be told.
    """
    runs = [entry for entry in entries if entry.info]
    if not runs:
        raise RunError("entanglement is read from the logs of runs, and there are audits only; give run folders")
    columns = (
        *(Column(key, head) for key, head in (("name", "run"), ("data", "data"))),
        *(Column(key, f"{key}-class", 3) for key in ("inter", "intra")),
        Column("entanglement", "entanglement", 2),
        Column("attention", "λ"),
        Column("status", "status"),
    )
    rows, guessed = [], []
    for entry in runs:
        inter, intra = entry.last("inter_distance"), entry.last("intra_distance")
        if inter is None or intra is None:
            inter, apart = entry.last("mean_distance"), entry.last("separability")
            intra = inter * (1 - apart) if inter is not None and apart is not None and apart < 1 else None
            guessed.append(entry.name)
        ratio = intra / inter if intra is not None and inter else None
        λ = number(entry.setting("attention"))
        rows.append((entry.name, dig(entry.info, "data", "name"), inter, intra, ratio, λ, entry.status))
    notes = ["mean distances of clean training images after the last epoch"]
    notes += [f"from d̄ and separability, too small where classes are few: {', '.join(guessed)}"] if guessed else []
    return Table(columns, tuple(rows), tuple(notes))
