"""ADML with its surrogate losses: each image of the batch against all of them, instead of mined tuples.

The batch is the paper's S. The surrogate l̂(x_i, S) is the mean of the contrastive loss over all pairs of x_i
(equation 7), or of the triplet loss over all triplets with anchor x_i (equation 8). Training minimises its mean over i
with the image z_i within ε of x_i:

    formulation 1: all z_i maximise Σ_i l̂(z_i, S) together                          (equation 11)
    formulation 2: z_i maximises l̂(z_i, S) alone                                    (equation 12)
    formulation 3: z_i maximises d(z_i, x_i), and λ d(z_i, x_i) is added to the loss (equation 13)

In formulations 2 and 3 S stays clean, x_i included. In formulation 1 S holds the z_i: with a clean S, equation 11 would
be equation 12, while the paper perturbs all samples at the same time. z_i is x_i where γ, drawn for each image, is 0;
the equations have no γ, which is an attack rate of 1.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .. import losses
from ..geometry import euclidean
from ..model.frozen import Embed
from ..perturb.problem import Objective
from .est import move_away
from .settings import AdmlSettings
from .step import Step, changed

__all__ = ["all_against_all", "one_against_all", "surrogate_training"]

# Embeddings (U, D), their positions (U,), S (B, D), and which of the embeddings (U,) are those in S, to (U,).
Surrogate = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def _surrogate(settings: AdmlSettings, labels: Tensor) -> Surrogate:
    """l̂ of equation 7 or 8, for a batch with these labels (B,)."""
    same, places = labels[:, None] == labels, torch.arange(len(labels), device=labels.device)
    most, margin = int(same.sum(1).max()) if len(labels) else 0, settings.margin

    def value(e: Tensor, at: Tensor, batch: Tensor, itself: Tensor | None = None) -> Tensor:
        distances = euclidean(e[:, None], batch)  # not by products: d(z, x) to its own image must not be rounded
        if itself is not None:  # 0, whose two gradients would cancel but for rounding
            distances = distances.masked_fill((at[:, None] == places) & itself[:, None], 0)
        if settings.loss == "contrastive":
            return losses.contrastive_surrogate(distances, same[at], margin)
        return losses.triplet_surrogate(distances, same[at], margin, most)

    return value


def one_against_all(surrogate: Surrogate, clean: Tensor, hit: Tensor) -> Objective:
    """Climb l̂(z_i, S) for the images at positions `hit` (U,), each alone against the clean batch (B, D) (eq. 12)."""
    return Objective(lambda e, at: surrogate(e[:, 0], hit[at], clean, None))


def all_against_all(surrogate: Surrogate, clean: Tensor, hit: Tensor) -> Objective:
    """Climb (1/n) Σ_i l̂(z_i, S) for the images at `hit` (U,) together, with S made of the z_i (eq. 11)."""
    everyone = torch.arange(len(clean), device=clean.device)
    itself = torch.ones_like(everyone, dtype=torch.bool)

    def value(e: Tensor, at: Tensor) -> Tensor:
        batch = clean.index_copy(0, hit, e[:, 0].to(clean.dtype))
        return surrogate(batch, everyone, batch, itself).mean()

    return Objective(value, coupled=True)


def surrogate_training(step: Step, settings: AdmlSettings) -> Iterator[Tensor]:
    """Perturb the images that γ chooses, and train on the mean of their surrogate losses."""
    images, together = step.batch.images, settings.formulation == 1
    everyone = torch.arange(len(images), device=images.device)
    surrogate = _surrogate(settings, step.batch.labels)
    # γ and the random start are drawn as for mined tuples, by twice the anchor's position.
    chosen = (step.key("attacked").uniform(2 * everyone) < settings.attack_rate) & (settings.eps > 0)
    hit = everyone[chosen]
    with step.frozen() as embed:
        clean = step.see(embed, images)
        moved = _moved(step, settings, embed, clean, surrogate, hit)
    count = len(images)
    if together:
        e = step.embed(images.index_copy(0, hit, moved))
        loss, there = surrogate(e, everyone, e, torch.ones_like(chosen)).mean(), e[hit]
    else:
        step.trains_on(torch.cat([everyone, hit]))
        e = step.embed(torch.cat([images, moved]))
        batch, there = e[:count], e[count:]
        loss = surrogate(batch.index_copy(0, hit, there), everyone, batch, ~chosen).mean()
        if settings.formulation == 3:
            loss = loss + settings.weight * euclidean(there, batch[hit]).sum() / max(count, 1)
    step.log("attacked", chosen.double().mean())
    if len(hit):
        step.log_shift(clean[hit], there, 1, clean, changed(images[hit], moved))
    else:
        step.log("image_steps", 0.0)
    yield loss


def _moved(
    step: Step, settings: AdmlSettings, embed: Embed, clean: Tensor, surrogate: Surrogate, hit: Tensor
) -> Tensor:
    """The images at `hit` after the attack of the formulation."""
    images = step.batch.images
    if not len(hit):
        return images[:0]
    if settings.formulation == 3:
        goal = move_away(clean[hit])
    else:
        goal = (all_against_all if settings.formulation == 1 else one_against_all)(surrogate, clean, hit)
    return step.perturb(embed, images[hit, None], goal, settings, ids=2 * hit)[:, 0]
