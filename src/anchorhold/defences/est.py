"""Training on shifted embeddings: images whose embeddings moved as far as possible (EST, SES, REST).

The adversary climbs d(e(x'), e(x)) and ignores triplets, so it raises the loss only indirectly. The
embedding-shifted triplet (EST, a baseline of Zhou & Patel 2022) trains with L_T on the moved images. Suppressing
the embedding shift (SES) trains on the clean images and pulls the moved ones back. Revised EST (REST) keeps anchors
clean.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .. import losses
from ..geometry import Distance, cosine, euclidean
from ..model.frozen import Embed
from ..perturb.problem import Objective
from ..triplets import Triplets
from .hardness import intra_class
from .settings import EstSettings, RestSettings, SesSettings, ShiftSettings
from .step import Step, changed

__all__ = [
    "embedding_shifted",
    "move_away",
    "revised_embedding_shifted",
    "suppressed_shift",
]

SHIFTS: dict[str, Distance] = {"euclidean": euclidean, "cosine": cosine}


def move_away(clean: Tensor, distance: Distance = euclidean) -> Objective:
    """Climb d(e(x'), e(x)) of single images, whose clean embeddings are (U, D) (the robust-init study, eq. 7).

    It is stationary at x' = x. From there the first step climbs the sum of the coordinates, as published.
    """
    return Objective(
        lambda e, positions: distance(e[:, 0], clean[positions]), first=lambda e, positions: e[:, 0].sum(1)
    )


def _moved(step: Step, embed: Embed, images: Tensor, clean: Tensor, settings: ShiftSettings) -> Tensor:
    return step.perturb(embed, images.unsqueeze(1), move_away(clean, SHIFTS[settings.shift]), settings).squeeze(1)


def embedding_shifted(step: Step, settings: EstSettings) -> Iterator[Tensor]:
    """EST: move every image of the batch, mine on the moved embeddings, and train with L_T on them.

    With `ics`, + λ · L_ICS between clean and moved anchors (Zhou & Patel 2022, eq. 8), through a pass of the clean
    images. So L_T has the batch statistics that it has without the term.
    """
    images, seen = step.batch.images, None
    if settings.ics or _has_live_batchnorm(step.model):
        # As published: the ascent uses the running statistics of live BatchNorm, and clean batches update them too.
        with torch.set_grad_enabled(settings.ics > 0):
            seen = step.embed(images)
    with step.frozen() as embed:
        clean = step.see(embed, images)
        moved = _moved(step, embed, images, clean, settings)
    e = step.embed(moved)
    chosen = step.mine(settings.sampler, e.detach(), settings.margin, **settings.mining)
    # Batch statistics alone move embeddings, so the shift is measured from clean embeddings in the same mode.
    before = clean if seen is None else seen.detach()
    step.log_shift(before, e, 1, before, changed(images, moved))
    loss = losses.triplet(e[chosen.anchor], e[chosen.positive], e[chosen.negative], settings.margin)
    yield loss + _structure(step, settings, seen, e, chosen)


def suppressed_shift(step: Step, settings: SesSettings) -> Iterator[Tensor]:
    """SES: L_T on clean images + w · mean d(e(x'), e(x)), with gradient through both embeddings; `ics` as in EST."""
    images = step.batch.images
    with step.frozen() as embed:
        clean = step.see(embed, images)
        moved = _moved(step, embed, images, clean, settings)
    step.trains_on(torch.arange(len(images)).repeat(2))
    e, there = step.embed(torch.cat([images, moved])).chunk(2)
    chosen = step.mine(settings.sampler, e.detach(), settings.margin, **settings.mining)
    step.log_shift(e.detach(), there, 1, e.detach(), changed(images, moved))
    loss = losses.triplet(e[chosen.anchor], e[chosen.positive], e[chosen.negative], settings.margin)
    loss = loss + settings.weight * SHIFTS[settings.shift](there, e).mean()
    yield loss + _structure(step, settings, e, there, chosen)


def _structure(
    step: Step, settings: EstSettings, clean: Tensor | None, moved: Tensor, chosen: Triplets
) -> Tensor | int:
    """λ · L_ICS of the clean anchors and positives of a batch (B, D) and its moved anchors; 0 without λ."""
    if not settings.ics or clean is None:
        return 0
    term = intra_class(clean[chosen.anchor], moved[chosen.anchor], clean[chosen.positive])
    step.log("ics", term.detach())
    return settings.ics * term


def revised_embedding_shifted(step: Step, settings: RestSettings) -> Iterator[Tensor]:
    """REST: mine on clean embeddings, move positives and negatives, and train with L_T(a, p', n')."""
    images = step.batch.images
    with step.frozen() as embed:
        clean = step.see(embed, images)
        chosen = step.mine(settings.sampler, clean, settings.window, **settings.mining)
        others = torch.cat([chosen.positive, chosen.negative])
        moved = _moved(step, embed, images[others], clean[others], settings)
    step.trains_on(torch.cat([chosen.anchor, others]))
    a, p, n = step.embed(torch.cat([images[chosen.anchor], moved])).chunk(3)
    step.log_shift(clean[others], torch.cat([p, n]), 2, clean, changed(images[others], moved))
    yield losses.triplet(a, p, n, settings.margin)


def _has_live_batchnorm(model: nn.Module) -> bool:
    return any(isinstance(module, _BatchNorm) and module.training for module in model.modules())
