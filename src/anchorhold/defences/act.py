"""Anti-collapse triplet (ACT, the baseline of paper 001): pull positive and negative together, learn to part them.

The positives and negatives of the batch's triplets are perturbed to minimise d(p', n'); anchors stay clean, and the
model trains with L_T(a, p', n'). The adversary never looks at the anchor, so it raises the loss only indirectly.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import losses
from ..geometry import euclidean
from ..perturb.ascend import Budget, Objective, ascend
from ..perturb.ball import Ball
from ..settings import check, nearest
from ..triplets import SAMPLERS
from .step import Step

__all__ = ["ActSettings", "anti_collapse", "collapse_pair"]


@dataclass(frozen=True)
class ActSettings:
    """ACT[sampler] of 001's tables; the default is ACT[R] with 8 steps."""

    sampler: str = "random"
    margin: float = 0.2
    window: float = 1.0  # how far beyond the positive a semihard negative may lie: not γ here, as in the published code
    eps: float = 8 / 255
    alpha: float = 1 / 255
    steps: int = 8

    def __post_init__(self) -> None:
        check(self.sampler in SAMPLERS, f"no sampler {self.sampler!r}; {nearest(self.sampler, SAMPLERS)}")
        check(self.margin >= 0 and self.window > 0, "the margin must not be negative, and the window must be above 0")
        check(self.eps >= 0 and self.steps >= 0 and self.alpha >= 0, "eps, alpha and steps must not be negative")


def collapse_pair() -> Objective:
    """Climb −d(p', n') of units (p, n). It has no goal short of zero, so no unit leaves."""
    return Objective(lambda e, positions: -euclidean(e[:, 0], e[:, 1]))


def anti_collapse(step: Step, settings: ActSettings) -> Iterator[Tensor]:
    """Perturb positives and negatives towards each other and train with L_T against the clean anchors."""
    images = step.batch.images
    with step.frozen() as embed:
        with torch.no_grad():
            clean = embed(images)
        chosen = step.mine(settings.sampler, clean, settings.window)
        units = images[torch.stack([chosen.positive, chosen.negative], dim=1)]
        ascent = ascend(embed, units, collapse_pair(), Ball(settings.eps), Budget(settings.steps, settings.alpha))
    step.log("image_steps", float(ascent.image_steps))
    views = torch.cat([images[chosen.anchor, None], ascent.images], dim=1)
    a, p, n = step.embed(views.flatten(0, 1)).unflatten(0, (-1, 3)).unbind(1)
    yield losses.triplet(a, p, n, settings.margin)
