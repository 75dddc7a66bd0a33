"""R@1 under the strong attack, and what the audit that it is from says about it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..attacks.settings import ATTACK_NAMES
from ..columns import length
from ..runs.fields import dig, number
from .collect import Entry
from .curve import headline_of, recall_left
from .tables import Cell, Column, Estimate, Radius

__all__ = [
    "AT",
    "at_each_eps",
    "attacked",
    "curved",
    "eps_of",
    "members_of",
    "norm_of",
    "of_strong",
    "queries_of",
    "shared_eps",
]


def attacked(entry: Entry) -> tuple[Estimate, Mapping[str, Any]] | None:
    """R@1 under the strong attack, from a strong audit or the curve of an audit, and that audit."""
    audits = (each.audit for each in (entry.strongest, entry, entry.curved) if each is not None and each.audit)
    known = ((recall_left(audit), audit) for audit in audits)
    return next(((Estimate(*found), audit) for found, audit in known if found is not None), None)


AT = "r1_at_"  # the key of R@1 at an ε, before that ε
CLEAN = "0"


def curved(entry: Entry) -> Mapping[str, Any] | None:
    """The audit of an entry that has R@1 against ε under the strong attack."""
    audits = (each.audit for each in (entry.strongest, entry, entry.curved) if each is not None and each.audit)
    return next((audit for audit in audits if headline_of(audit)), None)


def shared_eps(entries: Sequence[Entry]) -> dict[str, dict[str, float]]:
    """By norm, each ε but 0 that at least two curves have, with its name; those of a norm's only curve are all kept."""
    found: dict[str, list[dict[str, float]]] = {}
    for audit in filter(None, map(curved, entries)):
        found.setdefault(norm_of(audit), []).append(
            {_named(eps, norm_of(audit)): eps for eps in headline_of(audit) if eps}
        )
    shared = {}
    for norm, curves in found.items():
        known = {name: eps for own in curves for name, eps in own.items()}
        kept = [name for name in known if sum(name in own for own in curves) >= min(2, len(curves))]
        shared[norm] = {name: known[name] for name in sorted(kept, key=lambda name: known[name])}
    return shared


def at_each_eps(entries: Sequence[Entry]) -> list[tuple[Column, Callable[[Entry], Cell]]]:
    """A column of R@1 for the clean images of the curves, and for each of `shared_eps`."""

    def at(name: str) -> tuple[Column, Callable[[Entry], Cell]]:
        def cell(entry: Entry) -> Cell:
            audit = curved(entry) or {}
            levels = {_named(eps, norm_of(audit)): found for eps, found in headline_of(audit).items()}
            found = levels.get(name, {})
            value = found.get("value")
            return None if value is None else Estimate(value, found["low"], found["high"])

        return Column(AT + name, f"R@1 at {name.replace('l2_', 'L2 ')}" if name != CLEAN else "R@1 clean"), cell

    shared = shared_eps(entries)
    return [at(name) for name in (CLEAN, *(name for names in shared.values() for name in names))] if shared else []


def _named(eps: float, norm: str) -> str:
    """An ε in a key: one in L2 says so. Zero is the same in every norm."""
    return CLEAN if not eps else ("" if norm == "linf" else f"{norm}_") + length(eps, norm)


def of_strong(of: Callable[[Mapping[str, Any]], Cell]) -> Callable[[Entry], Cell]:
    """A value of the audit that R@1 strong is from."""

    def cell(entry: Entry) -> Cell:
        found = attacked(entry)
        return None if found is None else of(found[1])

    return cell


def norm_of(audit: Mapping[str, Any]) -> str:
    """The norm of its threat; Linf where an older audit does not say."""
    return str(dig(audit, "settings", "norm") or "linf")


def eps_of(audit: Mapping[str, Any]) -> Radius | None:
    """Its ε."""
    eps = number(dig(audit, "settings", "eps"))
    return None if eps is None else Radius(eps, norm_of(audit))


def members_of(audit: Mapping[str, Any]) -> str | None:
    """The members of its ensemble that attacked R@1, by name, in their order."""
    after, names = dig(audit, "strong", "after", "recall"), dig(audit, "curve", "attacks", "R@1")
    if isinstance(after, Mapping):
        known = [name for name in after if name != "standard"]
    elif isinstance(names, list):
        known = [str(name) for name in names if name not in ATTACK_NAMES]  # the others are the standard attacks
    else:
        known = []
    return ", ".join(known) or None


def queries_of(audit: Mapping[str, Any]) -> float | None:
    """How many queries its curve has, or were attacked."""
    counts = dig(audit, "data", "attacked")
    known = number(counts[0]) if isinstance(counts, list) and counts else None
    return number(dig(audit, "curve", "queries")) or known
