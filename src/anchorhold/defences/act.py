"""Anti-collapse triplet (ACT, the baseline of Zhou & Patel 2022): move positive and negative together.

The positives and negatives of the batch's triplets are perturbed to minimise d(p', n'); anchors stay clean, and the
model trains with L_T(a, p', n'). The adversary ignores the anchor, so it raises the loss only indirectly.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .. import losses
from ..geometry import euclidean
from ..perturb.problem import Objective
from .settings import ActSettings
from .step import Step, changed

__all__ = ["anti_collapse", "collapse_pair"]


def collapse_pair() -> Objective:
    """Climb −d(p', n') of units (p, n). Its only goal is zero, so no unit is dropped."""
    return Objective(lambda e, positions: -euclidean(e[:, 0], e[:, 1]))


def anti_collapse(step: Step, settings: ActSettings) -> Iterator[Tensor]:
    """Perturb positives and negatives towards each other and train with L_T against the clean anchors."""
    images = step.batch.images
    with step.frozen() as embed:
        clean = step.see(embed, images)
        chosen = step.mine(settings.sampler, clean, settings.window, **settings.mining)
        pairs = torch.stack([chosen.positive, chosen.negative], dim=1)
        units = step.perturb(embed, images[pairs], collapse_pair(), settings)
    views = torch.cat([images[chosen.anchor, None], units], dim=1)
    step.trains_on(torch.cat([chosen.anchor[:, None], pairs], dim=1))
    a, p, n = step.embed(views.flatten(0, 1)).unflatten(0, (-1, 3)).unbind(1)
    step.log_shift(clean[pairs], torch.stack([p, n], dim=1), 2, clean, changed(images[pairs], units))
    yield losses.triplet(a, p, n, settings.margin)
