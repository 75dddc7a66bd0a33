"""Audits of more and more queries, until the interval of ERS is narrow enough."""

import math
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from ..console import Report
from ..ranks import started
from ..scores import ERS_COLUMNS
from ..settings import check
from .verdict import Audit

__all__ = ["audit_until", "check_until"]


def check_until(until: float | None, attacks: Iterable[str] | None) -> None:
    """Refuse an interval that these attacks (None: all of ERS) cannot give."""
    check(until is None or until > 0, f"until is a number of points above 0, got {until}")
    known = None if attacks is None else set(attacks)
    missing = [] if known is None else sorted({name.split(":")[0] for name in ERS_COLUMNS} - known)
    check(
        until is None or not missing,
        f"until looks at the interval of ERS, which needs all nine attacks, and {', '.join(missing)} "
        f"{'is' if len(missing) == 1 else 'are'} missing: leave attacks out",
    )


def audit_until(
    once: Callable[[int, str | Path | None], Audit],
    limit: int,
    total: int,
    until: float,
    out: str | Path | None,
    report: Report,
) -> Audit:
    """`once(limit, place)` with more queries, each time in another place, until ERS is known to ±`until` points.

    Places are folders queries-N of `out`, from which a stopped audit goes on. At the end the last one's shards become
    those of `out`, and the folders go.
    """
    limit, places = min(limit or total, total), []
    while True:
        places += [] if out is None else [Path(out) / f"queries-{limit}"]
        found = once(limit, places[-1] if places else None)
        score = list(found.protocols.values())[-1].ers
        check(score is not None, "until looks at the interval of ERS, which needs all nine attacks: leave attacks out")
        assert score is not None
        half = (score.high - score.low) / 2
        if half <= until or limit == total:
            break
        # Intervals shrink with the root of the number of queries; a tenth more, not to fall short by a hair.
        limit = min(total, max(limit + 1, math.ceil(1.1 * limit * (half / until) ** 2)))
        report.say(f"ERS is known to ±{half:.2f}, not ±{until:g}: going on with {limit:,} queries")
    if out is not None and started()[0] == 0:  # of several ranks the first one writes
        found.save(out)
        if not (Path(out) / "shards").exists():
            (places[-1] / "shards").rename(Path(out) / "shards")
        for place in places:
            shutil.rmtree(place)
    return found
