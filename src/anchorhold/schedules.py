"""Schedules of a length over a training or an attack."""

import math
from typing import Literal

__all__ = ["Schedule", "falling"]


Schedule = Literal["constant", "linear", "cosine"]


def falling(schedule: Schedule, share: float) -> float:
    """The factor of a length that falls from 1 to 0, at this share of the way.

    >>> falling("linear", 0.25), falling("cosine", 0.5)
    (0.75, 0.5)
    """
    return {"constant": 1.0, "linear": 1 - share, "cosine": (1 + math.cos(math.pi * share)) / 2}[schedule]
