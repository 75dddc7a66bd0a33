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
from ..perturb.ascend import Objective
from ..settings import check, nearest
from ..triplets import SAMPLERS
from .step import Inner, Step

__all__ = ["ActSettings", "anti_collapse", "collapse_pair"]


@dataclass(frozen=True)
class ActSettings(Inner):
    """ACT[sampler] of 001's tables; the default is ACT[R] with 8 steps."""

    sampler: str = "random"
    margin: float = 0.2
    window: float = 1.0  # how far beyond the positive a semihard negative may lie: not γ here, as in the published code

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.sampler in SAMPLERS, f"no sampler {self.sampler!r}; {nearest(self.sampler, SAMPLERS)}")
        check(self.margin >= 0 and self.window > 0, "the margin must not be negative, and the window must be above 0")


def collapse_pair() -> Objective:
    """Climb −d(p', n') of units (p, n). It has no goal short of zero, so no unit leaves."""
    return Objective(lambda e, positions: -euclidean(e[:, 0], e[:, 1]))


def anti_collapse(step: Step, settings: ActSettings) -> Iterator[Tensor]:
    """Perturb positives and negatives towards each other and train with L_T against the clean anchors."""
    images = step.batch.images
    with step.frozen() as embed:
        clean = step.see(embed, images)
        chosen = step.mine(settings.sampler, clean, settings.window)
        pairs = torch.stack([chosen.positive, chosen.negative], dim=1)
        units = step.perturb(embed, images[pairs], collapse_pair(), settings)
    views = torch.cat([images[chosen.anchor, None], units], dim=1)
    a, p, n = step.embed(views.flatten(0, 1)).unflatten(0, (-1, 3)).unbind(1)
    step.log_shift(clean[pairs], torch.stack([p, n], dim=1), 2, clean)
    yield losses.triplet(a, p, n, settings.margin)
