"""Health of a training, from its log: signs of a collapse, and lost features."""

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["LOST", "RETRIEVES", "lost", "upper_end"]

RETRIEVES = 0.1  # share of the way from chance to R@1 = 1; a model above it has not collapsed
LOST = 0.5  # features whose R@1 falls below this share of the initial one are lost


def upper_end(row: Mapping[str, Any], sign: str) -> float:
    """Upper end of the one-sided 95 % interval of a sign of collapse.

    Older runs have only the value itself; without either the result is infinity. The value alone is unreliable with few
    images: it would stop a small folder with good retrieval. If R@1 is far above chance, classes have several centres
    and separability means nothing.
    """
    beyond = row.get("beyond_chance")
    if sign == "separability" and isinstance(beyond, int | float) and beyond > RETRIEVES:
        return math.inf
    known = (row.get(name) for name in (f"{sign}_high", sign))
    return next((float(value) for value in known if isinstance(value, int | float)), math.inf)


def lost(start: float | None, now: float | None, finished: bool = False) -> str:
    """A warning if a training lost the features of the weights that it began with; otherwise "".

    Args:
        start: R@1 of the features before training.
        now: R@1 of the features now.
        finished: whether the training makes a finished model (a defence), not weights to start from (a pretraining).
    """
    if start is None or now is None or now >= LOST * start:
        return ""
    fell = f"R@1 of the features fell from {start:.1f} to {now:.1f}"
    if finished:
        return (
            f"{fell}: little is left of the weights that training began with; try a smaller defence.eps or "
            "optimiser.lr, or model.train=head"
        )
    return (
        f"{fell}, too low for a defence to start from; "
        "try a smaller defence.eps or optimiser.lr; then start from that run, with larger values"
    )
