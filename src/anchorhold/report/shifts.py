"""Current names for the embedding shifts in the logs of older runs.

Older runs logged `shift` and `shift_overall`, means over all triplets: now `shift_all` and `shift_overall_all`. From a
zero start a triplet at its goal never moves. Those means divided by the active share of the first step are thus
the means over perturbed triplets. They are derived as `shift_perturbed` and `shift_overall_perturbed`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["DERIVED", "LEAST", "PHASES", "shifts_by_today"]

PHASES = ("cap", "anp", "candidates", "anchors")  # endings of columns of a single phase
DERIVED = "derived: the mean over all triplets divided by the active share of the first step"
LEAST = 0.1  # below this active share, rounding of the other triplets outweighs the shift
_OLD = re.compile(rf"(shift(?:_overall)?)((?:_(?:{'|'.join(PHASES)}))?)")

Row = Mapping[str, Any]


def shifts_by_today(rows: Sequence[Row], derivable: bool, random_start: bool) -> tuple[tuple[Row, ...], frozenset[str]]:
    """Rows of metrics.jsonl with current names, and the names of derived columns.

    `derivable` is False for runs with benign batches: the mean over all counts them, the active share does not. From a
    random start every triplet is perturbed.
    """
    made, derived = [], set[str]()
    for row in rows:
        new: dict[str, Any] = {}
        for name, value in row.items():
            old = _OLD.fullmatch(name)
            if old is None:
                new[name] = value
                continue
            new.setdefault(f"{old[1]}_all{old[2]}", value)
            share = 1.0 if random_start else _active(row, old[2])
            if derivable and share is not None and share >= LEAST and isinstance(value, int | float):
                derived.add(column := f"{old[1]}_perturbed{old[2]}")
                new.setdefault(column, value / share)
        made.append(new)
    return tuple(made), frozenset(derived)


def _active(row: Row, ending: str) -> float | None:
    """The share of triplets active at the first step, for the phase of this ending if there is one."""
    share = row.get("active_first")
    # CA-TRIDE logs one share for both phases; it applies to each phase only if it is 1.
    share = row.get(f"active_first{ending}", share if not ending or share == 1 else None)
    return share if isinstance(share, int | float) else None
