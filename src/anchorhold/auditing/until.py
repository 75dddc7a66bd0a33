"""Audits of more and more queries, until the interval of ERS is narrow enough."""

import math
from collections.abc import Callable
from pathlib import Path

from ..console import Report
from ..settings import check
from .verdict import Audit

__all__ = ["audit_until"]


def audit_until(
    once: Callable[[int, str | Path | None], Audit],
    limit: int,
    total: int,
    until: float,
    out: str | Path | None,
    report: Report,
) -> Audit:
    """`once(limit, place)` with more queries, each time in another place, until ERS is known to ±`until` points."""
    limit = min(limit or total, total)
    while True:
        found = once(limit, None if out is None else Path(out) / f"queries-{limit}")
        score = list(found.protocols.values())[-1].ers
        check(score is not None, "until looks at the interval of ERS, which needs all nine attacks: leave attacks out")
        assert score is not None
        half = (score.high - score.low) / 2
        if half <= until or limit == total:
            break
        # Intervals shrink with the root of the number of queries; a tenth more, not to fall short by a hair.
        limit = min(total, max(limit + 1, math.ceil(1.1 * limit * (half / until) ** 2)))
        report.say(f"ERS is known to ±{half:.2f}, not ±{until:g}: going on with {limit:,} queries")
    if out is not None:
        found.save(out)
    return found
