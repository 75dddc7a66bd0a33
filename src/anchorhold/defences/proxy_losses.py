"""What training by class proxies measures: a loss of embeddings, the attack that raises it, and what TRADES adds.

`Ours` goes by learned proxies: p(x) = softmax(scale · cos(f(x), proxies)), with the normalised softmax or the
Proxy-Anchor loss, and with the divergence KL(p(x) ‖ p(x')) for TRADES. `Yours` takes any loss(embeddings, labels), with
what that learns. It need not have class probabilities, so the distance for TRADES is ‖f(x) − f(x')‖².
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from .. import losses
from ..geometry import unit
from ..perturb.problem import Objective
from ..random import Key
from .est import move_away
from .madry import raise_loss
from .proxy_settings import ProxySettings
from .step import Step
from .trades import PULLS
from .training_loss import loss_of_yours

__all__ = ["Measured", "Ours", "Proxies", "Targets", "Yours", "proxy_loss", "raise_divergence", "raise_proxy_loss"]


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


class Measured(Protocol):
    """The numbers of embeddings (B, D) by which a step trains and attacks."""

    def loss(self, e: Tensor) -> Tensor:
        """L of the batch, one number."""
        ...

    def apart(self, clean: Tensor, moved: Tensor) -> Tensor:
        """The distance of TRADES between clean and moved images, one number."""
        ...

    def goal(self, known: Tensor) -> Objective:
        """What the attack raises, from the clean embeddings `known`."""
        ...

    def hits(self, e: Tensor) -> Tensor | None:
        """The share of the images that are classified rightly, where there are classes to choose from."""
        ...


@dataclass(frozen=True)
class Ours:
    """By learned proxies."""

    companion: Proxies
    targets: Targets
    settings: ProxySettings

    def loss(self, e: Tensor) -> Tensor:
        return proxy_loss(self.companion(e), self.targets, self.settings).mean()

    def apart(self, clean: Tensor, moved: Tensor) -> Tensor:
        before, after = (self.settings.scale * self.companion(e) for e in (clean, moved))
        return losses.divergence(before, after).mean()

    def goal(self, known: Tensor) -> Objective:
        proxies = self.companion.proxies.detach()
        if self.settings.form == "trades":
            return raise_divergence(proxies, known, self.settings.scale)
        return raise_proxy_loss(proxies, self.targets, self.settings)

    def hits(self, e: Tensor) -> Tensor | None:
        return self.targets.hits(self.companion(e).detach()).mean()


@dataclass(frozen=True)
class Yours:
    """By a loss of yours over the whole batch."""

    step: Step
    settings: ProxySettings

    def loss(self, e: Tensor) -> Tensor:
        return loss_of_yours(self.step, e, self.step.batch.labels)

    def apart(self, clean: Tensor, moved: Tensor) -> Tensor:
        return PULLS["squared"](moved, clean).mean()

    def goal(self, known: Tensor) -> Objective:
        if self.settings.form == "trades":
            return move_away(known, PULLS["squared"])
        return raise_loss(self.step, self.settings, known)

    def hits(self, e: Tensor) -> Tensor | None:
        return None
