"""The values of a run that tables and pictures show.

ERS comes in both protocols, and from a strong audit where there is one. ARS of the published protocol uses the
published constants; ARS of the corrected protocol uses measured initial values.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from ..errors import check, nearest
from ..runs.fields import dig, number
from .collect import Entry
from .methods import method_of
from .recall_strong import attacked
from .tables import Cell, Column, Estimate, Mean

__all__ = [
    "COLLAPSE",
    "VALUES",
    "Value",
    "column_of",
    "counts",
    "judged",
    "method_cell",
    "new_value",
    "score_in",
    "value_of",
]

COLLAPSE = "collapse"
SAME = 0.05  # points that training's evaluation and an audit may differ by, since their batches round differently
SHORT = {"ers": "ers_published", "ars": "ars_published"}  # matrices are compared with the papers


@dataclass(frozen=True)
class Value:
    """A value of a run, with its column."""

    column: Column
    of: Callable[[Entry], Cell]


def _clean(name: str, logged: str) -> Callable[[Entry], Cell]:
    """The last value of the training, with the audit's interval if both agree; else the audit's value."""

    def of(entry: Entry) -> Cell:
        known, seen = entry.last(logged), dig(entry.audit, "clean", name)
        value = number(dig(seen, "value"))
        if known is not None and (value is None or abs(known - value) > SAME):
            return known
        if value is None:
            return None
        return Estimate(value if known is None else known, number(dig(seen, "low")), number(dig(seen, "high")))

    return of


def score_in(audit: Mapping[str, Any] | None, protocol: str, score: str) -> Estimate | None:
    """ers or ars of a protocol with its interval. ARS uses published constants if published, else measured values."""
    place = [score] if score == "ers" else [score, "constants" if protocol == "published" else "measured"]
    found = dig(audit, "protocols", protocol, *place)
    value = number(dig(found, "value"))
    return None if value is None else Estimate(value, number(dig(found, "low")), number(dig(found, "high")))


def _score(protocol: str, score: str) -> Callable[[Entry], Cell]:
    """A score of a run; of a collapsed model, the word, since its ERS means nothing."""

    def of(entry: Entry) -> Cell:
        audit = dict(entry.strongest.audit or {}) if protocol == "strong" and entry.strongest else entry.audit
        # Few runs have a strong audit: without one the cell stays empty.
        if entry.collapsed and (protocol != "strong" or entry.strongest):
            return COLLAPSE
        return score_in(audit, protocol, score)

    return of


def _left(entry: Entry) -> Cell:
    found = attacked(entry)
    return None if found is None else found[0]


def new_value(key: str, head: str, of: Callable[[Entry], Cell], digits: int = 1, **options: bool) -> Value:
    """A value with its column: key, head, digits and the options of `Column`."""
    return Value(Column(key, head, digits, **options), of)


VALUES: dict[str, Value] = {
    value.column.key: value
    for value in (
        new_value("r1", "R@1", _clean("R@1", "r1")),
        new_value("r2", "R@2", _clean("R@2", "r2"), span=False, spare=True),
        new_value("map_r", "mAP@R", _clean("mAP@R", "map_r"), span=False, spare=True),
        new_value("r1_strong", "R@1 strong", _left),
        new_value("ers_published", "ERS publ.", _score("published", "ers")),
        new_value("ers_corrected", "ERS corr.", _score("corrected", "ers")),
        new_value("ers_strong", "ERS strong", _score("strong", "ers")),
        new_value("ars_published", "ARS publ.", _score("published", "ars"), span=False, spare=True),
        new_value("ars_corrected", "ARS corr.", _score("corrected", "ars"), span=False, spare=True),
        new_value(
            "seconds",
            "seconds",
            lambda e: number(e.info.get("seconds")) or e.last("seconds"),
            0,
            thousands=True,
            spare=True,
        ),
        new_value(
            "image_steps", "image-steps", lambda e: number(e.info.get("image_steps")), 0, thousands=True, spare=True
        ),
        new_value("audit_seconds", "audit s", lambda e: number(dig(e.audit, "seconds")), 0, thousands=True, spare=True),
    )
}


def method_cell(entry: Entry) -> Cell:
    """The papers' name of its defence; None for an audit without a run."""
    return method_of(dig(entry.info, "settings", "defence")) if entry.info else None


def counts(cell: Cell) -> TypeGuard[float | Estimate | Mean]:
    """Whether a cell holds a number."""
    return cell is not None and not isinstance(cell, str)


def value_of(entry: Entry, key: str) -> Cell:
    """A value by its key: one of `VALUES`, or the last of any column of metrics.jsonl."""
    key = SHORT.get(key, key)
    return VALUES[key].of(entry) if key in VALUES else entry.last(key)


def column_of(entries: Sequence[Entry], key: str) -> Column:
    """The column of a value; refuses one that no run has."""
    key = SHORT.get(key, key)
    if key in VALUES:
        return VALUES[key].column
    logged = {name for entry in entries for row in entry.rows for name in row}
    known = {*VALUES, *SHORT, *logged}
    check(key in logged, f"no run has a value {key!r}; {nearest(key, known)}")
    return Column(key, key, 3)


def judged(entry: Entry, value: str) -> Cell:
    """A value for a comparison; COLLAPSE for a collapsed model."""
    return COLLAPSE if entry.collapsed else value_of(entry, value)
