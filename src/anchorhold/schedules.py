"""Schedules of a length over a training or an attack."""

import math
from typing import Literal

__all__ = ["LearningSchedule", "Schedule", "falling", "grown", "learning"]


Schedule = Literal["constant", "linear", "cosine"]
LearningSchedule = Literal["constant", "linear", "cosine", "one-cycle"]

# As in torch.optim.lr_scheduler.OneCycleLR: from 1/25 up to 1 over three tenths, then down to 1/250,000.
_RISE, _FIRST, _LAST = 0.3, 1 / 25, 1 / 25 / 1e4


def falling(schedule: Schedule, share: float) -> float:
    """The factor of a length that falls from 1 to 0, at this share of the way.

    >>> falling("linear", 0.25), falling("cosine", 0.5)
    (0.75, 0.5)
    """
    return {"constant": 1.0, "linear": 1 - share, "cosine": (1 + math.cos(math.pi * share)) / 2}[schedule]


def learning(schedule: LearningSchedule, share: float) -> float:
    """The factor of a learning rate at this share of the training; `one-cycle` rises first, by a cosine each way.

    >>> learning("one-cycle", 0), learning("one-cycle", 0.3), learning("cosine", 0.5)
    (0.04, 1.0, 0.5)
    """
    if schedule != "one-cycle":
        return falling(schedule, share)
    if share < _RISE:
        return _FIRST + (1 - _FIRST) * (1 - falling("cosine", share / _RISE))
    return _LAST + (1 - _LAST) * falling("cosine", (share - _RISE) / (1 - _RISE))


def grown(share: float, over: float) -> float:
    """The factor of a length that grows evenly from 0 to 1 over the first part (`over`) of a training.

    >>> grown(0.25, 0.5), grown(0.75, 0.5), grown(0, 0)
    (0.5, 1.0, 1.0)
    """
    return 1.0 if share >= over else share / over
