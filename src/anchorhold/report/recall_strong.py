"""R@1 under the strong attack, and what the audit that it is from says about it."""

from collections.abc import Callable, Mapping
from typing import Any

from ..attacks.settings import ATTACK_NAMES
from ..runs.fields import dig, number
from .collect import Entry
from .curve import recall_left
from .tables import Cell, Estimate, Radius

__all__ = ["attacked", "eps_of", "members_of", "norm_of", "of_strong", "queries_of"]


def attacked(entry: Entry) -> tuple[Estimate, Mapping[str, Any]] | None:
    """R@1 under the strong attack, from a strong audit or the curve of an audit, and that audit."""
    audits = (each.audit for each in (entry.strongest, entry, entry.curved) if each is not None and each.audit)
    known = ((recall_left(audit), audit) for audit in audits)
    return next(((Estimate(*found), audit) for found, audit in known if found is not None), None)


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
