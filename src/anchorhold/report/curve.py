"""A curve over ε as lines of text."""

from collections.abc import Mapping
from typing import Any

from ..columns import NOT_PERCENT, pixel_fraction

__all__ = ["shown_lines", "table_of_curve"]


def shown_lines(lines: Mapping[str, Any]) -> dict[str, Any]:
    """The lines to show: R@1 and ERS where they exist, else all."""
    return {name: lines[name] for name in ("R@1", "ERS") if name in lines} or dict(lines)


def table_of_curve(curve: Mapping[str, Any], clean: float | None, total: int) -> list[str]:
    """The curve as lines of text; `clean` is R@1 over all `total` queries, while the curve may use a sample."""
    head = ["against ε", *("0 (clean)" if not eps else pixel_fraction(eps) for eps in curve["eps"])]
    rows = [
        [name, *("–" if value is None else f"{value:.{3 if name in NOT_PERCENT else 1}f}" for value in values)]
        for name, values in shown_lines(curve["lines"]).items()
    ]
    text = [
        "".join(f"{cell:>11}" if place else f"{cell:16}" for place, cell in enumerate(row)) for row in [head, *rows]
    ]
    queries = curve.get("queries")
    if clean is not None and "R@1" in curve["lines"] and queries is not None and queries != total:
        text.append(f"clean R@1 over all {total:,} queries is {clean:.1f}")
    return [*text, str(curve.get("about", ""))]
