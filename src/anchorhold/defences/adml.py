"""Adversarial deep metric learning (ADML): train on tuples in which one image is replaced by its worst case.

Every image of the batch is an anchor a, with a positive p (its partner) and a negative n, drawn by distance. The
triplet loss takes them as one tuple, the contrastive loss as two, (a, p) and (a, n). With probability P(γ = 1), the
attack rate, one image of a tuple moves by

    ρ(i, j, k) = argmax over δ of 1[y_i = y_j] · d(x_i + δ, x_j) − 1[y_i ≠ y_k] · d(x_i + δ, x_k)        (equation 14)

The positive moves away from the anchor (equations 15 and 16), the negative towards it, the anchor does both
(appendix F). That is formulation 2: one image moves, the others are clean. In formulation 1 all images of the batch
move at once (equation 11). In formulation 3 the image moves away from its clean embedding, and λ times that distance is
added to the loss (equation 13).

The setting `objective` has other readings of these equations: the loss with its hinge in formulation 1, and the
surrogate losses of `surrogates`, which compare each image with the whole batch instead of mined tuples.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import losses
from ..geometry import euclidean
from ..model.frozen import Embed
from ..perturb.problem import Objective
from .est import move_away
from .settings import AdmlSettings
from .step import Step, changed
from .surrogates import surrogate_training

__all__ = ["adversarial_metric_learning", "all_at_once", "loss_at_once", "worst_case"]


# A tuple is a row of four positions, the two ends of d(a, p) and the two of d(a, n). It contains the anchor twice,
# since the anchors of the two contrastive pairs move independently.
PULLED, POSITIVE, PUSHED, NEGATIVE = range(4)


class Target(NamedTuple):
    """The column that moves by ρ(i, j, k), the columns of j and k, and a second column that gets the moved image."""

    i: int
    j: int
    k: int
    also: int


PAIRS = {
    "positive": (Target(POSITIVE, PULLED, PULLED, also=POSITIVE),),
    "negative": (Target(NEGATIVE, PUSHED, PUSHED, also=NEGATIVE),),
    "anchor": (Target(PULLED, POSITIVE, POSITIVE, also=PULLED), Target(PUSHED, NEGATIVE, NEGATIVE, also=PUSHED)),
}
TARGETS = {"contrastive": PAIRS, "triplet": PAIRS | {"anchor": (Target(PULLED, POSITIVE, NEGATIVE, also=PUSHED),)}}


def worst_case(clean: Tensor, labels: Tensor, i: Tensor, j: Tensor, k: Tensor) -> Objective:
    """Climb 1[y_i = y_j] · d(x_i + δ, x_j) − 1[y_i ≠ y_k] · d(x_i + δ, x_k) (ADML, eq. 14).

    `i`, `j` and `k` (U,) are positions in the batch, `clean` (B, D) its embeddings and `labels` (B,) its classes.
    """
    flees, approaches = labels[i] == labels[j], labels[i] != labels[k]

    def value(e: Tensor, at: Tensor) -> Tensor:
        away, towards = (euclidean(e[:, 0], clean[other[at]]) for other in (j, k))
        return flees[at] * away - approaches[at] * towards

    return Objective(value)


def all_at_once(pulled: Tensor, pushed: Tensor) -> Objective:
    """Climb Σ d(a', p') − Σ d(a', n') over pairs of positions (P, 2) while all images move (ADML, eq. 11).

    There is no hinge, as in equation 14: a tuple with zero loss would have no gradient to start with.
    """

    def total(e: Tensor, pairs: Tensor) -> Tensor:
        return euclidean(e[pairs[:, 0], 0], e[pairs[:, 1], 0]).sum()

    return Objective(lambda e, at: total(e, pulled) - total(e, pushed), coupled=True)


def loss_at_once(pulled: Tensor, pushed: Tensor, loss: str, margin: float) -> Objective:
    """Climb the loss with its hinge while all images move (ADML, eq. 11): Σ [d(a', p') − d(a', n') + α]₊ of triplets.

    Of contrastive pairs it is Σ d(a', p') + Σ [α − d(a', n')]₊. Arguments as in `all_at_once`; of triplets the rows
    belong together. A triplet with zero loss has no gradient: from a zero start it stays where it is.
    """

    def value(e: Tensor, at: Tensor) -> Tensor:
        near, far = (euclidean(e[pairs[:, 0], 0], e[pairs[:, 1], 0]) for pairs in (pulled, pushed))
        if loss == "triplet":
            return torch.relu(near - far + margin).sum()
        return near.sum() + torch.relu(margin - far).sum()

    return Objective(value, coupled=True)


class Attacked(NamedTuple):
    """Moved images (U, …), their positions (U,) in the batch, and the tuples, in which B + u is moved image u."""

    images: Tensor
    origins: Tensor
    tuples: Tensor


Perturbed = Callable[[Step, AdmlSettings, Embed, Tensor, Tensor], Attacked]


def _hit(step: Step, settings: AdmlSettings, numbers: Tensor) -> Tensor:
    """γ for each tuple; False everywhere where ε is 0."""
    return (step.key("attacked").uniform(numbers) < settings.attack_rate) & (settings.eps > 0)


def _one_image(objective: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Objective]) -> Perturbed:
    """Formulations 2 and 3: one image of each attacked tuple moves."""

    def attack(step: Step, settings: AdmlSettings, embed: Embed, clean: Tensor, tuples: Tensor) -> Attacked:
        images, after, parts = step.batch.images, tuples.clone(), []
        place = len(images)
        for target in TARGETS[settings.loss][settings.perturb]:
            # γ and the random start are drawn by this number: 2a in anchor a's d(a, p), 2a + 1 in its d(a, n).
            numbers = 2 * tuples[:, PULLED] + target.i // 2
            rows = _hit(step, settings, numbers).nonzero().squeeze(1)
            after[rows, target.i] = after[rows, target.also] = torch.arange(place, place + len(rows)).to(rows)
            place += len(rows)
            parts.append(torch.stack([*(tuples[rows, column] for column in target[:3]), numbers[rows]]))
        i, j, k, numbers = torch.cat(parts, dim=1)
        if not len(i):
            return Attacked(images[:0], i, tuples)
        goal = objective(clean, step.batch.labels, i, j, k)
        return Attacked(step.perturb(embed, images[i, None], goal, settings, ids=numbers)[:, 0], i, after)

    return attack


def _all_images(step: Step, settings: AdmlSettings, embed: Embed, clean: Tensor, tuples: Tensor) -> Attacked:
    """Formulation 1: every image moves once, for all attacked tuples together."""
    images = step.batch.images
    pull = _hit(step, settings, 2 * tuples[:, PULLED])
    push = pull if settings.loss == "triplet" else _hit(step, settings, 2 * tuples[:, PULLED] + 1)
    origins = torch.arange(len(images)).to(tuples)
    if not (pull | push).any():
        return Attacked(images[:0], origins[:0], tuples)
    pairs = tuples[pull][:, :PUSHED], tuples[push][:, PUSHED:]
    hinged = settings.objective == "loss"
    goal = loss_at_once(*pairs, settings.loss, settings.margin) if hinged else all_at_once(*pairs)
    moved = step.perturb(embed, images[:, None], goal, settings)[:, 0]
    hit = torch.stack([pull, pull, push, push], dim=1)
    return Attacked(moved, origins, torch.where(hit, tuples + len(images), tuples))


FORMULATIONS: dict[int, Perturbed] = {
    1: _all_images,
    2: _one_image(worst_case),
    3: _one_image(lambda clean, labels, i, j, k: move_away(clean[i])),
}


def adversarial_metric_learning(step: Step, settings: AdmlSettings) -> Iterator[Tensor]:
    """Attack tuples and train on all of them: l(x_1, x_2 + γρ(2, 1)) or l(x_1, x_2 + γρ(2, 1), x_3), eqs. 15, 16."""
    if settings.objective == "surrogate":
        yield from surrogate_training(step, settings)
        return
    images, cuts = step.batch.images, (settings.lower or None, settings.upper or None)
    with step.frozen() as embed:
        clean = step.see(embed, images)
        chosen = step.mine(settings.sampler, clean, settings.margin, lower=cuts[0], upper=cuts[1], anchors="all")
        tuples = torch.stack([chosen.anchor, chosen.positive, chosen.anchor, chosen.negative], dim=1)
        moved, origins, tuples = FORMULATIONS[settings.formulation](step, settings, embed, clean, tuples)
    step.trains_on(torch.cat([torch.arange(len(images)).to(origins), origins]))
    e = step.embed(torch.cat([images, moved]))
    pulled, positive, pushed, negative = e[tuples].unbind(1)
    near, far = euclidean(pulled, positive), euclidean(pushed, negative)
    if settings.loss == "triplet":
        loss = losses.triplet(near, near, far, settings.margin, _measured)
    else:
        loss = losses.contrastive(near, near, far, settings.margin, _measured, settings.reduction)
    there, here = e[len(images) :], e[origins]
    if settings.formulation == 3:
        loss = loss + settings.weight * euclidean(there, here).sum() / len(tuples)
    step.log("attacked", (tuples >= len(images)).any(1).double().mean())
    if len(moved):
        members = 3 if settings.formulation == 1 else 1
        step.log_shift(clean[origins], there, members, clean, changed(images[origins], moved))
    else:
        step.log("image_steps", 0.0)
    yield loss


def _measured(_: Tensor, distance: Tensor) -> Tensor:
    """The distance for a loss whose distances are already computed."""
    return distance
