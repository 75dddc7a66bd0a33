"""Refuses to replace an audit in a folder where its results would be lost."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..columns import length
from ..errors import RunError, check
from ..interface import option, replacing
from ..runs.audits import read_audit
from ..runs.fields import dig, number
from .plan import AuditSettings
from .shards import as_known, but_sample

__all__ = ["check_kept", "check_place", "drop_receipts"]

# Another value of these gives other numbers. The batch, the precision and the like are compared with the shards.
_SAME = {"method": "method", "norm": "norm", "steps": "steps", "start": "start", "seed": "seed"}


def check_place(out: str | Path | None, strength: str, replaces: bool) -> None:
    """Refuse an output folder that is a file, or where receipts would be lost."""
    check(
        out is None or not os.path.isfile(out),
        f"{out} is a file, and an audit needs a folder: choose another {option('out')}",
    )
    check(
        out is None or replaces or strength == "strong" or not os.path.isdir(Path(out) / "receipts"),
        f"{out} holds a strong audit with receipts, which this audit would invalidate: "
        f"use {option('strength', 'strong')}, or choose another {option('out')}, or give {replacing()}",
    )


def check_kept(
    out: str | Path,
    settings: AuditSettings,
    weights: str,
    data: Mapping[str, Any],
    queries: int | None,
    more: bool = False,
) -> None:
    """Refuse to replace the audit in `out` if this one would lose some of its results.

    Args:
        out: the output folder.
        settings: of the new audit.
        weights: the hash of its model.
        data: the description of its data.
        queries: number of its attacked queries; None if it is not known yet.
        more: whether more queries than before are welcome, as with `until`.
    """
    try:
        known = read_audit(Path(out))
    except RunError:  # none, or none that can be used
        return
    lost = [*_of_subject(known, weights, data), *_of_settings(known["settings"], settings)]
    before = number((dig(known, "data", "attacked") or [None])[0])
    if before is not None and queries is not None and (queries < before or (queries != before and not more)):
        lost.append(f"its {before:,.0f} queries (now {queries:,})")
    if lost:
        raise RunError(
            f"{out} holds an audit, and this one would lose {', '.join(lost)}: "
            f"give another {option('out')}, or {replacing()} to replace it"
        )


def _of_subject(known: Mapping[str, Any], weights: str, data: Mapping[str, Any]) -> list[str]:
    """What is lost with another model or other images."""
    was = dig(known, "model", "weights")
    lost = ["the results of another model"] if was is not None and was != weights else []
    before, now = known["data"], as_known(data, known["data"])
    sides = ("query", "gallery")
    same = all(side not in before or but_sample(before[side]) == but_sample(now[side]) for side in sides)
    return lost + ([] if same else ["the results of other data"])


def _of_settings(was: Mapping[str, Any], settings: AuditSettings) -> list[str]:
    """What is lost by these settings."""
    now, norm = asdict(settings), str(was.get("norm") or "linf")
    lost = []
    for name, said in (("attacks", ""), ("protocols", "the protocol ")):
        gone = [str(each) for each in was.get(name) or () if each not in now[name]]
        lost += [said + ", ".join(gone)] if gone else []
    size = number(was.get("eps"))
    if size is not None and abs(size - settings.eps) > 1e-9:
        lost.append(f"its ε {length(size, norm)} (now {length(settings.eps, settings.norm)})")
    step = number(was.get("alpha"))
    if step is not None and abs(step - settings.alpha) > 1e-9:
        lost.append(f"its step size {length(step, norm)} (now {length(settings.alpha, settings.norm)})")
    levels = [level for level in map(number, was.get("epsilons") or ()) if level is not None]
    gone_levels = [level for level in levels if all(abs(level - each) > 1e-9 for each in settings.epsilons)]
    if gone_levels:
        lost.append(f"R@1 at ε {', '.join(length(each, norm) for each in gone_levels)}")
    if was.get("strength") == "strong" and settings.strength != "strong":
        lost.append("the strong audit")
    starts = number(was.get("seeds"))
    if starts is not None and starts > settings.seeds:
        lost.append(f"{starts:.0f} random starts (now {settings.seeds})")
    lost += [
        f"its {said} {was[name]} (now {now[name]})"
        for name, said in _SAME.items()
        if was.get(name) is not None and was[name] != now[name]
    ]
    return lost


def drop_receipts(out: str | Path) -> None:
    """Delete the receipts of a strong audit that is replaced by one without them."""
    folder = Path(out) / "receipts"
    if (folder / "receipts.json").is_file() and not folder.is_symlink():
        shutil.rmtree(folder)
