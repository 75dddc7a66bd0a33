"""Robust features from soft labels: perturbed images must get the answers that the clean network gave at the start.

min_θ max_δ T² · KL(p_0(x) ‖ p_θ(x + δ)), where p = softmax(logits / T) and p_0 is the network before training. It is
adversarial training of a classifier on any images, without labels. The logits are those of the classifier that the
weights come with. Without one, the pooled features are the logits.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..data.images import Images
from ..defences.step import Step
from ..device import precise
from ..errors import check
from ..losses import divergence
from ..model.classifier import Linear, classifier_of
from ..model.embedder import Embedder
from ..perturb.problem import Objective
from ..random import Key
from .distil import Original
from .features import Precision, Through, measured
from .settings import DistilLogitsSettings

__all__ = ["Teacher", "agreements", "distil_logits", "raise_soft_loss", "soft_loss", "teacher", "with_logits"]


class Logits(nn.Linear):
    """A classifier whose logits are in fp32 also under autocast; float64 stays."""

    def forward(self, features: Tensor) -> Tensor:
        out = super().forward(features)
        return out if out.dtype == torch.float64 else out.float()


class Teacher(Original):
    """The network before training with its classifier, frozen; and the copy of the classifier that is trained."""

    def __init__(self, model: Embedder, labels: Tensor, settings: DistilLogitsSettings, known: Linear | None) -> None:
        super().__init__(model, labels, settings.holdout)
        self.first, self.linear = (_linear(model.width, settings.logits, known, model.mean) for _ in range(2))
        self.first.requires_grad_(False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.first(self.embedder.features(images))
        return out


def _linear(width: int, count: int, known: Linear | None, like: Tensor) -> nn.Module:
    """The classifier `known`; one of zeros for a checkpoint to overwrite; or none."""
    if not count:
        return nn.Identity()
    made = Logits(width, count).to(like)
    with torch.no_grad():
        made.weight.copy_(known.weight) if known else made.weight.zero_()
        made.bias.copy_(known.bias) if known else made.bias.zero_()
    return made


def teacher(model: Embedder, labels: Tensor, settings: DistilLogitsSettings) -> Teacher:
    """A frozen copy of the model as it is now, with the classifier of its weights.

    A resumed model has no weights to read: its run recorded how many logits there are, and its checkpoint has them.
    """
    return Teacher(model, labels, settings, classifier_of(model) if settings.logits else None)


def with_logits(settings: DistilLogitsSettings, model: nn.Module) -> DistilLogitsSettings:
    """The settings of a new run with the number of logits that the weights of its model have."""
    known = classifier_of(model) if isinstance(model, Embedder) else None
    count = 0 if known is None else len(known.weight)
    told = f"defence.logits = {settings.logits}, but the weights have a classifier with {count} logits"
    check(settings.logits in (0, count), f"{told}: leave it out")
    return replace(settings, logits=count)


def soft_loss(first: Tensor, now: Tensor, temperature: float = 1.0) -> Tensor:
    """T² · KL(softmax(first / T) ‖ softmax(now / T)) of each image, (B, C) to (B,)."""
    return temperature**2 * divergence(first / temperature, now / temperature)


def raise_soft_loss(first: Tensor, temperature: float) -> Objective:
    """Climb the divergence from the logits `first` (U, C); it has no goal, so no unit is dropped."""
    return Objective(lambda e, positions: soft_loss(first[positions], e[:, 0], temperature))


def distil_logits(step: Step, settings: DistilLogitsSettings) -> Iterator[Tensor]:
    """The mean divergence of x + δ from the first network's answers, where δ maximises it; without held-out images."""
    companion = step.companion
    assert isinstance(companion, Teacher)
    images, _ = companion.kept(step)
    if len(images) < 2:  # live BatchNorm needs two images
        return
    with step.precision():
        first = step.see(companion, images)
    step = replace(step, model=Through(step.model, companion.linear))
    goal = raise_soft_loss(first, settings.temperature)
    with step.frozen() as logits:
        units = step.perturb(logits, images[:, None], goal, settings)
    yield soft_loss(first, step.embed(units[:, 0]), settings.temperature).mean()


def agreements(
    model: Embedder,
    companion: Teacher,
    images: Images,
    settings: DistilLogitsSettings,
    key: Key,
    precision: Precision,
) -> dict[str, float]:
    """On held-out images, clean and attacked: the mean of the loss, and how many keep the first network's answer.

    Under attack an image must have that answer before and after it.
    """

    def goal(views: Tensor, labels: Tensor) -> Objective:
        return raise_soft_loss(companion(views), settings.temperature)

    values: list[list[Tensor]] = [[], []]
    kept: list[list[Tensor]] = [[], []]
    for found in measured(Through(model, companion.linear), companion.held, images, goal, settings, key, precision):
        with precise():
            first = companion(found.views)
        right = torch.ones(len(first), dtype=torch.bool, device=first.device)
        for place, logits in enumerate((found.clean, found.attacked)):
            values[place].append(soft_loss(first.double(), logits.double(), settings.temperature))
            right = right & (logits.argmax(1) == first.argmax(1))
            kept[place].append(right)
    kl, kl_attacked = (torch.cat(each).mean().item() for each in values)
    same, same_attacked = (100 * torch.cat(each).double().mean().item() for each in kept)
    return {"kl": kl, "kl_attacked": kl_attacked, "agreement": same, "agreement_attacked": same_attacked}
