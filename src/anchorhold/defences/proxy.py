"""Training by one learned proxy for each class, as a classifier: natural, min-max or after TRADES.

    natural   L(x)
    minmax    c · L(x) + (1 − c) · L(x'),     x' maximises L                      (Madry et al. 2018)
    trades    L(x) + β · KL(p(x) ‖ p(x')),    x' maximises the divergence         (Zhang et al. 2019)

c is `clean`. With trades it may replace β = (1 − c) / c: then the loss is c · L(x) + (1 − c) · KL, over c.

p(x) = softmax(scale · cos(f(x), proxies)). L is −log p_y (the normalised softmax), or the Proxy-Anchor loss, which
couples the images of a batch, or a loss of yours (`proxy_losses`). Triplets collapse under min-max training; proxies
hold the classes apart.

CutMix gives an image two classes. Triplets may be added (`proxy_triplets`), and a teacher may hold clean embeddings
(`teacher`). The proxies are the companion of the run: trained at their own rate, saved, resumed and averaged with the
model.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..data.mixing import pasted
from .proxy_losses import Measured, Ours, Proxies, Targets, Yours, raise_divergence, raise_proxy_loss
from .proxy_triplets import perturbed_triplets, triplets_of_images, triplets_of_units
from .settings import ProxySettings
from .step import Step, changed
from .teacher import held
from .training_loss import is_yours
from .weight_perturbation import with_perturbed_weights

__all__ = ["Proxies", "class_proxies", "raise_divergence", "raise_proxy_loss"]


@dataclass(frozen=True)
class _Views:
    """What a step trains on, besides its clean images."""

    moved: Tensor  # the images after the attack
    known: Tensor  # the clean embeddings before the step, where images moved
    taught: Tensor | None  # those of the teacher
    triplets: Tensor | None  # (T, 3) positions of perturbed triplets
    units: Tensor | None  # (T, 3, C, H, W)


def class_proxies(step: Step, settings: ProxySettings) -> Iterator[Tensor]:
    """Perturb images where the form asks for it, and yield the loss that the form names."""
    step, targets = _mixed(step, settings)
    images, teacher = step.batch.images, _teacher_beside(step)
    moved, known, triplets, units, taught = images, images[:0], None, None, None
    if settings.raises or settings.hardens:
        with step.frozen() as embed:
            known = step.see(embed, images)
            if settings.raises:
                goal = _measured(step, settings, targets).goal(known)
                moved = step.perturb(embed, images[:, None], goal, settings.at(step.progress))[:, 0]
            if settings.hardens:
                triplets, units = perturbed_triplets(step, settings, embed, known)
    if teacher is not None:
        with step.precision():
            taught = step.see(teacher, images)
    views = _Views(moved, known, taught, triplets, units)

    def loss(step: Step) -> Tensor:
        return _loss(step, settings, _measured(step, settings, targets), views)

    if settings.awp and step.epoch >= settings.awp_from:
        step = with_perturbed_weights(step, loss, settings.awp)
    yield loss(step)


def _measured(step: Step, settings: ProxySettings, targets: Targets | None) -> Measured:
    """The loss by which this step trains: of proxies, or yours."""
    if targets is None:
        return Yours(step, settings)
    assert isinstance(step.companion, Proxies)
    return Ours(step.companion, targets, settings)


def _teacher_beside(step: Step) -> nn.Module | None:
    teacher: nn.Module | None = getattr(step.companion, "teacher", None)
    return teacher


def _mixed(step: Step, settings: ProxySettings) -> tuple[Step, Targets | None]:
    """The step with CutMix in its images, and what their classes are then; a loss of yours has labels instead."""
    if is_yours(settings):
        return step, None
    assert isinstance(step.companion, Proxies)
    own = step.companion.targets(step.batch.labels)
    if not settings.cutmix:
        return step, Targets(own)
    images, others, kept = pasted(step.batch.images, settings.cutmix, step.key("cutmix"))
    return replace(step, batch=replace(step.batch, images=images)), Targets(own, own[others], kept)


def _loss(step: Step, settings: ProxySettings, by: Measured, views: _Views) -> Tensor:
    """The loss of clean and moved images, with triplets and a teacher where there are any."""
    images, share = step.batch.images, settings.share
    # A teacher needs clean embeddings, also where their loss has no weight.
    both = settings.raises and (settings.form == "trades" or share > 0 or views.taught is not None)
    shown = [images, views.moved] if both else [views.moved]
    origins = torch.arange(len(images), device=images.device).repeat(len(shown))
    if views.units is not None and views.triplets is not None:
        shown.append(views.units.flatten(0, 1))
        origins = torch.cat([origins, views.triplets.flatten().to(origins)])
    step.trains_on(origins)
    e = step.embed(torch.cat(shown))
    whole = (2 if both else 1) * len(images)
    parts = e[:whole].split(len(images))
    loss = _of_form(step, settings, by, parts, views, share)
    if views.units is not None:
        loss = loss + settings.triplets * triplets_of_units(step, settings, e[whole:].unflatten(0, (-1, 3)))
    elif settings.triplets:
        loss = loss + settings.triplets * torch.stack([triplets_of_images(step, settings, e) for e in parts]).mean()
    return loss if views.taught is None else held(step, settings, loss, parts[0], views.taught)


def _of_form(
    step: Step, settings: ProxySettings, by: Measured, parts: tuple[Tensor, ...], views: _Views, share: float
) -> Tensor:
    """The loss by the form, from the embeddings of clean images, if they are embedded, and of moved ones."""
    hits = by.hits(parts[-1])
    if hits is not None:
        step.log("accuracy_training", 100 * hits)
    if settings.raises:
        step.log_shift(views.known, parts[-1], 1, views.known, changed(step.batch.images, views.moved))
    if len(parts) == 1:
        return by.loss(parts[0])
    clean = by.loss(parts[0])
    if settings.form == "minmax":
        return share * clean + (1 - share) * by.loss(parts[1])
    apart = by.apart(parts[0], parts[1])
    step.log("divergence", apart.detach())
    return clean + settings.beta_at(step.progress) * apart
