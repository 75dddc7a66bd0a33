"""Training by one learned proxy for each class, as a classifier: natural, min-max or after TRADES.

    natural   L(x)
    minmax    c · L(x) + (1 − c) · L(x'),     x' maximises L                      (Madry et al. 2018)
    trades    L(x) + β · KL(p(x) ‖ p(x')),    x' maximises the divergence         (Zhang et al. 2019)

c is `clean`. With trades it may replace β = (1 − c) / c: then the loss is c · L(x) + (1 − c) · KL, over c.

p(x) = softmax(scale · cos(f(x), proxies)). L is −log p_y (the normalised softmax), or the Proxy-Anchor loss, which
couples the images of a batch. Triplets collapse under min-max training; proxies hold the classes apart.

CutMix gives an image two classes. Triplets may be added, and a teacher may hold clean embeddings (`teacher.py`).
The proxies are the companion of the run: trained at their own rate, saved, resumed and averaged with the model.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .. import losses
from ..data.mixing import pasted
from ..geometry import unit
from ..perturb.problem import Objective
from ..random import Key
from .settings import ProxySettings
from .step import Step, changed
from .teacher import held
from .weight_perturbation import with_perturbed_weights

__all__ = ["Proxies", "class_proxies", "raise_divergence", "raise_proxy_loss"]


class Proxies(nn.Module):
    """One vector for each class of the training split, and cosines to them."""

    classes: Tensor

    def __init__(self, like: Tensor, labels: Tensor, key: Key, teacher: nn.Module | None = None) -> None:
        """Draw the proxies by `key`; they have the length, device and dtype of the embeddings `like` (B, D)."""
        super().__init__()
        self._teacher = (teacher,)  # in a tuple, so that its weights are neither trained nor saved with the proxies
        self.register_buffer("classes", torch.unique(labels).to(like.device))
        ids = torch.arange(len(self.classes))  # drawn on the CPU: cosines and logarithms differ between devices
        self.proxies = nn.Parameter(unit(key.normal(ids, (like.shape[1],), torch.float64)).to(like))

    def forward(self, embeddings: Tensor) -> Tensor:
        """cos(e, proxy) of embeddings (B, D) with all classes: (B, C)."""
        return _cosines(embeddings, self.proxies)

    @property
    def teacher(self) -> nn.Module | None:
        return self._teacher[0]

    def targets(self, labels: Tensor) -> Tensor:
        """Labels of the split as 0 … C−1."""
        return torch.searchsorted(self.classes, labels)


@dataclass(frozen=True)
class Targets:
    """The class of each image (B,). With CutMix it has the share `kept` of the target, and `other` has the rest."""

    own: Tensor
    other: Tensor | None = None
    kept: Tensor | None = None

    def at(self, positions: Tensor) -> "Targets":
        """Those of some images."""
        if self.other is None or self.kept is None:
            return Targets(self.own[positions])
        return Targets(self.own[positions], self.other[positions], self.kept[positions])

    def mean(self, own: Tensor, other: Tensor) -> Tensor:
        """What is linear in the target, from its values with each of both classes."""
        return own if self.kept is None else self.kept * own + (1 - self.kept) * other

    def hits(self, cosines: Tensor) -> Tensor:
        """Which images are nearest to the proxy of their class; a part of one with CutMix."""
        best = cosines.argmax(1)
        own = (best == self.own).double()
        return own if self.other is None else self.mean(own, (best == self.other).double())


def _cosines(embeddings: Tensor, proxies: Tensor) -> Tensor:
    with torch.autocast(embeddings.device.type, enabled=False):
        return unit(embeddings) @ unit(proxies).T


def proxy_loss(cosines: Tensor, targets: Targets, settings: ProxySettings) -> Tensor:
    """The loss that the settings name: of each image (B,), or of the batch, one number."""
    if settings.loss == "proxy-anchor":
        return losses.proxy_anchor(cosines, targets.own, settings.scale, settings.margin)
    scale, smoothing = settings.scale, settings.smoothing
    own = losses.proxy_softmax(cosines, targets.own, scale, smoothing)
    if targets.other is None:
        return own
    return targets.mean(own, losses.proxy_softmax(cosines, targets.other, scale, smoothing))


def raise_proxy_loss(proxies: Tensor, targets: Targets, settings: ProxySettings) -> Objective:
    """Climb the training loss of units of one image; it has no goal, so no unit is dropped."""
    if settings.loss == "softmax":
        return Objective(lambda e, at: proxy_loss(_cosines(e[:, 0], proxies), targets.at(at), settings))
    return Objective(lambda e, at: proxy_loss(_cosines(e[:, 0], proxies), targets, settings), coupled=True)


def raise_divergence(proxies: Tensor, clean: Tensor, scale: float) -> Objective:
    """Climb KL(p(x) ‖ p(x')) from the clean embeddings (U, D); labels have no part in it."""
    logits = scale * _cosines(clean, proxies)
    return Objective(lambda e, at: losses.divergence(logits[at], scale * _cosines(e[:, 0], proxies)))


@dataclass(frozen=True)
class _Views:
    """What a step trains on, besides its clean images."""

    targets: Targets
    moved: Tensor  # the images after the attack
    known: Tensor  # the clean embeddings before the step, where images moved
    taught: Tensor | None  # those of the teacher


def class_proxies(step: Step, settings: ProxySettings) -> Iterator[Tensor]:
    """Perturb images where the form asks for it, and yield the loss that the form names."""
    companion = step.companion
    assert isinstance(companion, Proxies)
    step, targets = _mixed(step, settings, companion.targets(step.batch.labels))
    images, moved, known, taught = step.batch.images, step.batch.images, step.batch.images[:0], None
    if settings.raises:
        proxies = companion.proxies.detach()
        with step.frozen() as embed:
            known = step.see(embed, images)
            trades = settings.form == "trades"
            goal = (
                raise_divergence(proxies, known, settings.scale)
                if trades
                else raise_proxy_loss(proxies, targets, settings)
            )
            moved = step.perturb(embed, images[:, None], goal, settings.at(step.progress))[:, 0]
    if companion.teacher is not None:
        with step.precision():
            taught = step.see(companion.teacher, images)
    views = _Views(targets, moved, known, taught)

    def loss(step: Step) -> Tensor:
        return _loss(step, settings, views)

    if settings.awp and step.epoch >= settings.awp_from:
        step = with_perturbed_weights(step, loss, settings.awp)
    yield loss(step)


def _mixed(step: Step, settings: ProxySettings, own: Tensor) -> tuple[Step, Targets]:
    """The step with CutMix in its images, and what their classes are then."""
    if not settings.cutmix:
        return step, Targets(own)
    images, others, kept = pasted(step.batch.images, settings.cutmix, step.key("cutmix"))
    return replace(step, batch=replace(step.batch, images=images)), Targets(own, own[others], kept)


def _loss(step: Step, settings: ProxySettings, views: _Views) -> Tensor:
    """The loss of clean and moved images, with triplets and a teacher where there are any."""
    assert isinstance(step.companion, Proxies)
    images, share = step.batch.images, 1.0 if settings.form != "minmax" else settings.clean
    # A teacher needs clean embeddings, also where their loss has no weight.
    both = settings.form == "trades" or 0 < share < 1 or (settings.raises and views.taught is not None)
    shown = torch.cat([images, views.moved]) if both else views.moved
    step.trains_on(torch.arange(len(images)).repeat(2 if both else 1))
    parts = step.embed(shown).split(len(images))
    loss = _of_proxies(step, settings, views, parts, share)
    if settings.triplets:
        loss = loss + settings.triplets * torch.stack([_of_triplets(step, settings, e) for e in parts]).mean()
    return loss if views.taught is None else held(step, settings, loss, parts[0], views.taught)


def _of_proxies(step: Step, settings: ProxySettings, views: _Views, parts: tuple[Tensor, ...], share: float) -> Tensor:
    """The loss by the form, from the embeddings of clean images, if they are embedded, and of moved ones."""
    assert isinstance(step.companion, Proxies)
    before, after = (step.companion(e) for e in (parts[0], parts[-1]))
    step.log("accuracy_training", 100 * views.targets.hits(after.detach()).mean())
    if settings.raises:
        step.log_shift(views.known, parts[-1], 1, views.known, changed(step.batch.images, views.moved))
    if len(parts) == 1:
        return proxy_loss(after, views.targets, settings).mean()
    clean = proxy_loss(before, views.targets, settings).mean()
    if settings.form == "minmax":
        return share * clean + (1 - share) * proxy_loss(after, views.targets, settings).mean()
    apart = losses.divergence(settings.scale * before, settings.scale * after).mean()
    step.log("divergence", apart.detach())
    return clean + settings.beta_at(step.progress) * apart


def _of_triplets(step: Step, settings: ProxySettings, e: Tensor) -> Tensor:
    """The margin loss of triplets that are mined on embeddings (B, D) of the whole batch."""
    margin = settings.triplet_margin
    chosen = step.mine(settings.sampler, e.detach(), margin, "triplets")
    return losses.triplet(e[chosen.anchor], e[chosen.positive], e[chosen.negative], margin)
