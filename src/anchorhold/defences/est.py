"""Training on shifted embeddings: images moved as far from where they lay as they will go (EST, SES, REST).

The adversary climbs d(e(x'), e(x)) and knows nothing of triplets, so it raises the loss only indirectly. The
embedding-shifted triplet (EST, a baseline of papers 000 and 001) trains with L_T on the moved images. Suppressing
the embedding shift (SES) trains on the clean ones and pulls the moved ones back. Revised EST (REST) leaves anchors
where they are.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .. import losses
from ..geometry import Distance, cosine, euclidean
from ..model.frozen import Embed
from ..perturb.ascend import Objective
from ..settings import check, nearest
from ..triplets import SAMPLERS
from .step import Inner, Step

__all__ = [
    "EstSettings",
    "RestSettings",
    "SesSettings",
    "embedding_shifted",
    "move_away",
    "revised_embedding_shifted",
    "suppressed_shift",
]

SHIFTS: dict[str, Distance] = {"euclidean": euclidean, "cosine": cosine}


@dataclass(frozen=True)
class EstSettings(Inner):
    """EST[sampler] of 001's table 6; the default is EST[R] with 8 steps. 000 A.7 has start = random."""

    sampler: str = "random"
    margin: float = 0.2
    # The distance that is climbed. On the sphere 1 − cos = d²/2, so both lead the same way; SES also weighs it.
    shift: Literal["euclidean", "cosine"] = "euclidean"

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.sampler in SAMPLERS, f"no sampler {self.sampler!r}; {nearest(self.sampler, SAMPLERS)}")
        check(self.shift in SHIFTS, f"no shift {self.shift!r}; {nearest(self.shift, SHIFTS)}")
        check(self.margin >= 0, f"the margin must not be negative, got {self.margin}")


@dataclass(frozen=True)
class SesSettings(EstSettings):
    """SES[sampler]: the loss on clean images and, by its weight, the shift itself."""

    weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.weight >= 0, f"the weight of the shift must not be negative, got {self.weight}")


@dataclass(frozen=True)
class RestSettings(EstSettings):
    """REST[sampler]: EST with clean anchors."""

    window: float = 1.0  # how far beyond the positive a semihard negative may lie: not γ here, as in the published code

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.window > 0, f"the window must be above 0, got {self.window}")


def move_away(clean: Tensor, distance: Distance = euclidean) -> Objective:
    """Climb d(e(x'), e(x)) of single images, whose clean embeddings are (U, D) (000 equation 7).

    It is stationary at x' = x. From there the first step climbs the sum of the coordinates, as published.
    """
    return Objective(
        lambda e, positions: distance(e[:, 0], clean[positions]), first=lambda e, positions: e[:, 0].sum(1)
    )


def _moved(step: Step, embed: Embed, images: Tensor, clean: Tensor, settings: EstSettings) -> Tensor:
    return step.perturb(embed, images.unsqueeze(1), move_away(clean, SHIFTS[settings.shift]), settings).squeeze(1)


def embedding_shifted(step: Step, settings: EstSettings) -> Iterator[Tensor]:
    """EST: move every image of the batch, mine on where they went, and train with L_T there."""
    images = step.batch.images
    with torch.no_grad():
        # As published: the running statistics of live BatchNorm, which the ascent uses, follow clean batches too.
        seen = step.embed(images) if _has_live_batchnorm(step.model) else None
    with step.frozen() as embed:
        clean = step.see(embed, images)
        moved = _moved(step, embed, images, clean, settings)
    e = step.embed(moved)
    chosen = step.mine(settings.sampler, e.detach(), settings.margin)
    # Batch statistics alone move embeddings: under them, clean ones in the same mode are what the moved came from.
    before = clean if seen is None else seen
    step.log_shift(before, e, 1, before)
    yield losses.triplet(e[chosen.anchor], e[chosen.positive], e[chosen.negative], settings.margin)


def suppressed_shift(step: Step, settings: SesSettings) -> Iterator[Tensor]:
    """SES: L_T on clean images + w · mean d(e(x'), e(x)), with gradient through both embeddings."""
    images = step.batch.images
    with step.frozen() as embed:
        clean = step.see(embed, images)
        moved = _moved(step, embed, images, clean, settings)
    e, there = step.embed(torch.cat([images, moved])).chunk(2)
    chosen = step.mine(settings.sampler, e.detach(), settings.margin)
    step.log_shift(e.detach(), there, 1, e.detach())
    loss = losses.triplet(e[chosen.anchor], e[chosen.positive], e[chosen.negative], settings.margin)
    yield loss + settings.weight * SHIFTS[settings.shift](there, e).mean()


def revised_embedding_shifted(step: Step, settings: RestSettings) -> Iterator[Tensor]:
    """REST: mine on clean embeddings, move positives and negatives, and train with L_T(a, p', n')."""
    images = step.batch.images
    with step.frozen() as embed:
        clean = step.see(embed, images)
        chosen = step.mine(settings.sampler, clean, settings.window)
        others = torch.cat([chosen.positive, chosen.negative])
        moved = _moved(step, embed, images[others], clean[others], settings)
    a, p, n = step.embed(torch.cat([images[chosen.anchor], moved])).chunk(3)
    step.log_shift(clean[others], torch.cat([p, n]), 2, clean)
    yield losses.triplet(a, p, n, settings.margin)


def _has_live_batchnorm(model: nn.Module) -> bool:
    return any(isinstance(module, _BatchNorm) and module.training for module in model.modules())
