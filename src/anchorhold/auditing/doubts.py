"""What a strong audit hands to the flags: shares of samples, and how far the standard attacks overstate."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..columns import NOT_PERCENT
from .ensemble import Task
from .members import Member
from .outcomes import Outcome
from .shards import REJECTED

__all__ = ["doubts_of", "overstated"]


def doubts_of(
    chosen: Sequence[Task],
    whole: Mapping[str, Mapping[str, Tensor]],
    members: Sequence[Member],
) -> dict[str, float]:
    """The input of the flags about the ensemble, in percent.

    The shares of samples that Square, or transfer, beat after all gradient attacks, at the audit's ε or a smaller one
    of its curve. They are shares of right answers. Without a recall goal, they count samples moved by 5 % of the list
    or more. And the share of samples with a perturbed image whose embedding is not finite, where there are some.
    """
    found: dict[str, float] = {}
    task = next((each for each in chosen if each.name == "recall"), chosen[0] if chosen else None)
    if task is None:
        return found
    rejected = [100 * float(rows[REJECTED].double().mean()) for rows in whole.values() if REJECTED in rows]
    found |= {REJECTED: max(rejected)} if rejected else {}
    rows = whole[task.name]
    clean = rows[f"before/{task.main}"]
    counted = clean > 0.5 if task.name == "recall" else torch.ones_like(clean, dtype=torch.bool)
    kinds = {member.kind for member in members}
    # Without gradient attacks there is nothing that the others could beat.
    for kind in kinds - {"white"} if "white" in kinds and counted.any() else ():
        found[kind] = 100 * float(rows[f"beaten/{kind}"][counted].double().mean())
    return found


def _scale(column: str) -> int:
    """The factor from a column of the table to percent."""
    return 100 if column in NOT_PERCENT else 1


def overstated(outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """The standard and the strong value of `what`: of ERS, or of the column that fell most.

    Rounded to one decimal, as in the table, so that their difference equals the one in the flag.
    """
    standard, strong = outcomes["corrected"], outcomes["strong"]
    if standard.ers is not None and strong.ers is not None:
        return {"standard": round(standard.ers.value, 1), "strong": round(strong.ers.value, 1), "what": "ERS"}
    falls = {
        name: _scale(name) * abs(standard.columns[name].value - column.value)
        for name, column in strong.columns.items()
        if name in standard.columns
    }
    name = max(falls, key=lambda each: falls[each], default=None)
    if name is None:
        return {}
    scale = _scale(name)
    return {
        "standard": round(scale * standard.columns[name].value, 1),
        "strong": round(scale * strong.columns[name].value, 1),
        "what": name if scale == 1 else f"100·{name}",
    }
