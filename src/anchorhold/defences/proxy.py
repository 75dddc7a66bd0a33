"""Training by one learned proxy for each class, as a classifier: natural, min-max or after TRADES.

    natural   L(x)
    minmax    c · L(x) + (1 − c) · L(x'),     x' maximises L                      (Madry et al. 2018)
    trades    L(x) + β · KL(p(x) ‖ p(x')),    x' maximises the divergence         (Zhang et al. 2019)

c is `clean`. With trades it may replace β = (1 − c) / c: then the loss is c · L(x) + (1 − c) · KL, over c.

p(x) = softmax(scale · cos(f(x), proxies)). L is −log p_y (the normalised softmax), or the Proxy-Anchor loss, which
couples the images of a batch. Triplets collapse under min-max training; proxies hold the classes apart.

The proxies are the companion of the run: trained at their own rate, saved, resumed and averaged with the model.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .. import losses
from ..geometry import unit
from ..perturb.problem import Objective
from ..random import Key
from .settings import ProxySettings
from .step import Step, changed
from .weight_perturbation import with_perturbed_weights

__all__ = ["Proxies", "class_proxies", "raise_divergence", "raise_proxy_loss"]


class Proxies(nn.Module):
    """One vector for each class of the training split, and cosines to them."""

    classes: Tensor

    def __init__(self, like: Tensor, labels: Tensor, key: Key) -> None:
        """Draw the proxies by `key`; they have the length, device and dtype of the embeddings `like` (B, D)."""
        super().__init__()
        self.register_buffer("classes", torch.unique(labels).to(like.device))
        ids = torch.arange(len(self.classes))  # drawn on the CPU: cosines and logarithms differ between devices
        self.proxies = nn.Parameter(unit(key.normal(ids, (like.shape[1],), torch.float64)).to(like))

    def forward(self, embeddings: Tensor) -> Tensor:
        """cos(e, proxy) of embeddings (B, D) with all classes: (B, C)."""
        return _cosines(embeddings, self.proxies)

    def targets(self, labels: Tensor) -> Tensor:
        """Labels of the split as 0 … C−1."""
        return torch.searchsorted(self.classes, labels)


def _cosines(embeddings: Tensor, proxies: Tensor) -> Tensor:
    with torch.autocast(embeddings.device.type, enabled=False):
        return unit(embeddings) @ unit(proxies).T


def proxy_loss(cosines: Tensor, targets: Tensor, settings: ProxySettings) -> Tensor:
    """The loss that the settings name: of each image (B,), or of the batch, one number."""
    if settings.loss == "softmax":
        return losses.proxy_softmax(cosines, targets, settings.scale, settings.smoothing)
    return losses.proxy_anchor(cosines, targets, settings.scale, settings.margin)


def raise_proxy_loss(proxies: Tensor, targets: Tensor, settings: ProxySettings) -> Objective:
    """Climb the training loss of units of one image; it has no goal, so no unit is dropped."""
    if settings.loss == "softmax":
        return Objective(lambda e, at: proxy_loss(_cosines(e[:, 0], proxies), targets[at], settings))
    return Objective(lambda e, at: proxy_loss(_cosines(e[:, 0], proxies), targets, settings), coupled=True)


def raise_divergence(proxies: Tensor, clean: Tensor, scale: float) -> Objective:
    """Climb KL(p(x) ‖ p(x')) from the clean embeddings (U, D); labels have no part in it."""
    logits = scale * _cosines(clean, proxies)
    return Objective(lambda e, at: losses.divergence(logits[at], scale * _cosines(e[:, 0], proxies)))


def class_proxies(step: Step, settings: ProxySettings) -> Iterator[Tensor]:
    """Perturb images where the form asks for it, and yield the loss that the form names."""
    assert isinstance(step.companion, Proxies)
    images, moved, known = step.batch.images, step.batch.images, step.batch.images[:0]
    targets = step.companion.targets(step.batch.labels)
    if settings.raises:
        proxies = step.companion.proxies.detach()
        with step.frozen() as embed:
            known = step.see(embed, images)
            trades = settings.form == "trades"
            goal = (
                raise_divergence(proxies, known, settings.scale)
                if trades
                else raise_proxy_loss(proxies, targets, settings)
            )
            moved = step.perturb(embed, images[:, None], goal, settings.at(step.progress))[:, 0]

    def loss(step: Step) -> Tensor:
        return _loss(step, settings, targets, moved, known)

    if settings.awp and step.epoch >= settings.awp_from:
        step = with_perturbed_weights(step, loss, settings.awp)
    yield loss(step)


def _loss(step: Step, settings: ProxySettings, targets: Tensor, moved: Tensor, known: Tensor) -> Tensor:
    """The loss of clean and moved images; `known` are the clean embeddings where images moved."""
    assert isinstance(step.companion, Proxies)
    images, share = step.batch.images, 1.0 if settings.form != "minmax" else settings.clean
    both = settings.form == "trades" or 0 < share < 1
    shown = torch.cat([images, moved]) if both else moved
    step.trains_on(torch.arange(len(images)).repeat(2 if both else 1))
    e = step.embed(shown)
    there = e[-len(images) :]
    cosines = step.companion(e)
    after = cosines[-len(images) :]
    step.log("accuracy_training", 100 * (after.detach().argmax(1) == targets).double().mean())
    if settings.raises:
        step.log_shift(known, there, 1, known, changed(images, moved))
    if not both:
        return proxy_loss(after, targets, settings).mean()
    before = cosines[: len(images)]
    clean = proxy_loss(before, targets, settings).mean()
    if settings.form == "minmax":
        return share * clean + (1 - share) * proxy_loss(after, targets, settings).mean()
    apart = losses.divergence(settings.scale * before, settings.scale * after).mean()
    step.log("divergence", apart.detach())
    return clean + settings.beta_at(step.progress) * apart
