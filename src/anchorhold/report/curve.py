"""R@1 against ε, as an audit.json has it: as lines of text, and as points with intervals."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..columns import as_text, length
from ..runs.fields import dig, number

__all__ = ["classes_line", "headline_of", "recall_left", "shown_lines", "spans_of", "table_of_curve"]

WIDTH = 15  # of a column of the table: room for an interval


def shown_lines(lines: Mapping[str, Any]) -> dict[str, Any]:
    """The lines to show: R@1 and ERS where they exist, else all."""
    return {name: lines[name] for name in ("R@1", "ERS") if name in lines} or dict(lines)


def spans_of(curve: Mapping[str, Any], line: str) -> list[tuple[float, float] | None]:
    """The 95 % interval of each point; None where the file has none."""
    known = dig(curve, "intervals", line) or []
    count = len(curve["eps"])
    return [_span(known[at] if at < len(known) else None) for at in range(count)]


def _span(ends: Any) -> tuple[float, float] | None:
    if not isinstance(ends, list | tuple) or len(ends) != 2:
        return None
    low, high = number(ends[0]), number(ends[1])
    return None if low is None or high is None else (low, high)


def classes_line(curve: Mapping[str, Any]) -> tuple[str, list[Any]] | None:
    """A name and the values of R@1 over the worst classes; None where the file has none."""
    worst, counted, every = (dig(curve, "classes", name) for name in ("worst", "counted", "of"))
    if not isinstance(worst, list | tuple) or len(worst) != len(curve["eps"]):
        return None
    return f"worst {counted} of {every} classes", list(worst)


def _level(eps: float, norm: str) -> str:
    """An ε as a head of the table."""
    return length(eps, norm) if eps else "0 (clean)"


def headline_of(audit: Mapping[str, Any]) -> dict[float, dict[str, float | None]]:
    """R@1 at each ε under the strong attack, with its interval, the clean value first; empty without a curve."""
    curve = audit.get("curve") or {}
    values = dig(curve, "lines", "R@1") if dig(curve, "protocol") == "strong" else None
    if not isinstance(values, list) or not dig(curve, "eps"):
        return {}
    spans = spans_of(curve, "R@1")
    return {
        eps: {
            "value": number(value),
            "low": None if span is None else span[0],
            "high": None if span is None else span[1],
        }
        for eps, value, span in zip(curve["eps"], values, spans)
        if number(eps) is not None
    }


def recall_left(audit: Mapping[str, Any] | None) -> tuple[float, float | None, float | None] | None:
    """R@1 under the strong attack at the audit's ε, with its interval: from the curve, or from a strong audit."""
    eps = number(dig(audit, "settings", "eps"))
    found = headline_of(audit or {}).get(eps or 0.0) if eps else None
    found = found or dig(audit, "protocols", "strong", "columns", "ES:R")
    value = number(dig(found, "value"))
    return None if value is None else (value, number(dig(found, "low")), number(dig(found, "high")))


def table_of_curve(curve: Mapping[str, Any], clean: float | None, total: int, norm: str = "linf") -> list[str]:
    """The curve as lines of text; `clean` is R@1 over all `total` queries, while the curve may use a sample."""
    head_of_eps = "against ε" if norm == "linf" else f"against {norm.upper()} ε"
    rows = [[head_of_eps, *(_level(eps, norm) for eps in curve["eps"])]]
    for name, values in shown_lines(curve["lines"]).items():
        rows.append([name, *(as_text(value, name) for value in values)])
        spans = spans_of(curve, name)
        if any(spans):
            rows.append(["", *("" if span is None else f"[{span[0]:.1f}, {span[1]:.1f}]" for span in spans)])
    worst = classes_line(curve)
    head = 16
    if worst is not None:
        rows.append([worst[0], *(as_text(value, "R@1") for value in worst[1])])
        head = max(head, len(worst[0]) + 1)
    text = [_line(row, head) for row in rows]
    queries = curve.get("queries")
    if clean is not None and "R@1" in curve["lines"] and queries is not None and queries != total:
        text.append(f"clean R@1 over all {total:,} queries is {clean:.1f}")
    return [*text, str(curve.get("about", ""))]


def _line(row: Sequence[str], head: int) -> str:
    return "".join(f"{cell:>{WIDTH}}" if place else f"{cell:{head}}" for place, cell in enumerate(row)).rstrip()
