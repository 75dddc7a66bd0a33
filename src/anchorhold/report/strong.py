"""Additional tables of a strong audit."""

from collections.abc import Mapping
from typing import Any

from ..columns import as_text
from ..runs.fields import dig, number

__all__ = ["tables_of"]


def tables_of(audit: Mapping[str, Any]) -> dict[str, list[list[str]]]:
    """Tables of an audit.json by title, each with its head first; empty without a strong audit."""
    strong = audit.get("strong") or {}
    after, forms = strong.get("after") or {}, strong.get("realisable") or {}
    found: dict[str, list[list[str]]] = {}
    if after:
        known = strong.get("members")
        order = ["standard", *(known if isinstance(known, list) else [])]
        used = dict.fromkeys(name for each in after.values() for name in each)
        members = [name for name in order if name in used] + [name for name in used if name not in order]
        named = {{"recall": "R@1", "ES": "ES:D"}.get(goal, goal): each for goal, each in after.items()}
        rows = [
            [name, *(as_text(number(each.get(member)), name) for member in members)] for name, each in named.items()
        ]
        found["After each member"] = [["goal", *members], *rows]
    if forms:
        outcome = dig(audit, "protocols", "strong") or {}
        columns = {name: dig(column, "value") for name, column in (outcome.get("columns") or {}).items()}
        kinds = {"as found": {**columns, "ERS": dig(outcome, "ers", "value")}}
        kinds |= {form: {**(dig(each, "columns") or {}), "ERS": dig(each, "ers")} for form, each in forms.items()}
        cells = {name: [number(each.get(name)) for each in kinds.values()] for name in kinds["as found"]}
        rows = [
            [name, *(as_text(cell, name) for cell in row)]
            for name, row in cells.items()
            if any(c is not None for c in row)
        ]
        found["As files"] = [["column", *kinds], *rows]
    return found
