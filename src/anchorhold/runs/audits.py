"""Reading the record of an audit, audit.json, and its attack in words."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..columns import length, radius
from ..errors import RunError
from .fields import dig, number, parsed
from .files import regular
from .schemas import AUDIT_SCHEMA

__all__ = ["attack_in_words", "read_audit"]


def read_audit(path: Path) -> dict[str, Any]:
    """Read audit.json; refuse one that cannot be used."""
    file = path / "audit.json"
    try:
        audit: dict[str, Any] = parsed(regular(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {file}: {error}") from None
    if dig(audit, "schema") != AUDIT_SCHEMA:
        raise RunError(f"{file} has schema {dig(audit, 'schema')!r}; this version reads {AUDIT_SCHEMA}")
    if not all(isinstance(audit.get(part), dict) for part in ("settings", "data", "clean", "protocols")):
        raise RunError(f"{file} lacks settings, data, clean metrics or protocols")
    return audit


def attack_in_words(settings: Mapping[str, Any]) -> str:
    """The attack of an audit by its settings, which may come from anyone.

    >>> attack_in_words({"method": "pgd", "eps": 8 / 255, "steps": 32, "alpha": 3 / 255})
    'PGD, ε 8/255, 32 steps of 3/255'
    >>> attack_in_words({"method": "square", "eps": 0.5, "norm": "l2", "steps": 1000})
    'SQUARE, L2 ε 0.5, 1,000 queries each'
    """
    method, eps, steps, alpha = (settings.get(name) for name in ("method", "eps", "steps", "alpha"))
    method, size, norm = str(method or "pgd"), number(eps), str(settings.get("norm") or "linf")
    told = f"{method.upper()}, " + ("ε unknown" if size is None else radius(size, norm))
    count = number(steps)
    if count is not None and method != "fgsm":
        stride = number(alpha)
        plain = "" if stride is None else f" of {length(stride, norm)}"
        each = {"pgd": f"steps{plain}", "cw": "iterations"}.get(method, "queries each")
        told += f", {count:,.0f} {each}"
    starts = number(settings.get("seeds")) or 1
    random = f" from {starts:.0f} random starts" if starts > 1 else " from a random start"
    return told + (random if settings.get("start") == "random" else "")
