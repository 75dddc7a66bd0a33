"""R@1 under the strong attack, and what the audit that it is from says about it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..attacks.settings import ATTACK_NAMES
from ..columns import length
from ..runs.fields import dig, number
from .collect import Entry
from .curve import headline_of, recall_left
from .tables import Cell, Column, Estimate, Radius

__all__ = ["AT", "at_each_eps", "attacked", "curved", "eps_of", "members_of", "norm_of", "of_strong", "queries_of"]


def attacked(entry: Entry) -> tuple[Estimate, Mapping[str, Any]] | None:
    """R@1 under the strong attack, from a strong audit or the curve of an audit, and that audit."""
    audits = (each.audit for each in (entry.strongest, entry, entry.curved) if each is not None and each.audit)
    known = ((recall_left(audit), audit) for audit in audits)
    return next(((Estimate(*found), audit) for found, audit in known if found is not None), None)


AT = "r1_at_"  # the key of R@1 at an ε, before that ε


def curved(entry: Entry) -> Mapping[str, Any] | None:
    """The audit of an entry that has R@1 against ε under the strong attack."""
    audits = (each.audit for each in (entry.strongest, entry, entry.curved) if each is not None and each.audit)
    return next((audit for audit in audits if headline_of(audit)), None)


def at_each_eps(entries: Sequence[Entry]) -> list[tuple[Column, Callable[[Entry], Cell]]]:
    """A column of R@1 for each ε that all curves of a norm have, the clean value first."""
    shared: dict[str, dict[str, float]] = {}
    for audit in filter(None, map(curved, entries)):
        norm = norm_of(audit)
        own = {_named(eps, norm): eps for eps in sorted(headline_of(audit))}
        known = shared.setdefault(norm, own)
        shared[norm] = {name: eps for name, eps in known.items() if name in own}

    def made(norm: str, name: str, eps: float) -> tuple[Column, Callable[[Entry], Cell]]:
        def cell(entry: Entry) -> Cell:
            audit = curved(entry) or {}
            levels = {_named(each, norm): found for each, found in headline_of(audit).items()}
            found = levels.get(name, {}) if norm_of(audit) == norm else {}
            value = found.get("value")
            return None if value is None else Estimate(value, found["low"], found["high"])

        head = f"R@1 at {name.replace('l2_', 'L2 ')}" if eps else "R@1 clean"
        return Column(AT + name, head), cell

    return [made(norm, *level) for norm, levels in shared.items() for level in levels.items()]


def _named(eps: float, norm: str) -> str:
    return ("" if norm == "linf" else f"{norm}_") + (length(eps, norm) if eps else "0")


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
