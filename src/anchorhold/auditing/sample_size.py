"""Audits with increasing numbers of queries, until the interval of ERS is narrow enough."""

import math
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from ..columns import ERS_COLUMNS
from ..console import Report
from ..distributed import started
from ..errors import check
from ..interface import argument, option
from .result import Audit

__all__ = ["audit_until", "check_until"]


def check_until(until: float | None, attacks: Iterable[str] | None) -> None:
    """Refuse `until` where these attacks (None: all of ERS) do not give ERS."""
    check(until is None or until > 0, f"{argument('until')} must be above 0 points, got {until}")
    known = None if attacks is None else set(attacks)
    missing = [] if known is None else sorted({name.split(":")[0] for name in ERS_COLUMNS} - known)
    check(
        until is None or not missing,
        f"{argument('until')} needs ERS and so all nine attacks; {', '.join(missing)} "
        f"{'is' if len(missing) == 1 else 'are'} missing: leave out {option('attacks')}",
    )


def audit_until(
    once: Callable[[int, str | Path | None], Audit],
    limit: int,
    total: int,
    until: float,
    out: str | Path | None,
    report: Report,
    check_kept: Callable[[int], None],
) -> Audit:
    """Call `once(limit, place)` with more queries, in a new place each time, until ERS is known to ±`until` points.

    Places are folders queries-N of `out`, from which a stopped audit resumes. At the end the shards of the last one
    move to `out`, and the folders are deleted. `check_kept(queries)` may refuse to replace an audit in `out`.
    """
    limit, places = min(limit or total, total), []
    while True:
        places += [] if out is None else [Path(out) / f"queries-{limit}"]
        found = once(limit, places[-1] if places else None)
        score = list(found.protocols.values())[-1].ers
        check(
            score is not None, f"{argument('until')} needs ERS and so all nine attacks: leave out {option('attacks')}"
        )
        assert score is not None
        half = (score.high - score.low) / 2
        if half <= until or limit == total:
            break
        # Intervals shrink with the root of the number of queries; 10 % more avoids another round.
        limit = min(total, max(limit + 1, math.ceil(1.1 * limit * (half / until) ** 2)))
        report.say(f"ERS is known to ±{half:.2f}, not ±{until:g}: continuing with {limit:,} queries")
    if out is not None:
        check_kept(limit)
    if out is not None and started()[0] == 0:  # only the first rank writes
        found.save(out)
        shutil.rmtree(Path(out) / "shards", ignore_errors=True)  # those of fewer queries
        (places[-1] / "shards").rename(Path(out) / "shards")
        for place in places:
            shutil.rmtree(place)
    return found
