"""Robust features without labels: the network learns to see in a perturbed image what it saw in the clean one before.

min_θ max_δ ‖f_θ(x + δ) − f_0(x)‖², where f_0 is the network it began as. A network with good features becomes a
robust initialisation (paper 000) on any images of the kind it will search through.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..model.embedder import Embedder
from ..model.frozen import precise
from ..monitors import Images
from ..perturb.ascend import Budget, Objective
from ..random import Key
from .pretrain import Companion, Precision, PretrainSettings, Through, measured
from .step import Step

__all__ = ["DistilSettings", "Original", "distil", "drifts", "original", "raise_drift"]


@dataclass(frozen=True, kw_only=True)
class DistilSettings(PretrainSettings):
    """Feature distillation; steps as for `classify`, but an ε that the features survive from the start."""

    eps: float = 2 / 255
    alpha: float = 4 / 765

    @property
    def budget(self) -> Budget:
        # While the network is still the original the drift is 0 at x, and so is its gradient: nothing would move.
        return replace(super().budget, start="tiny" if self.start == "zero" else self.start)


class Original(Companion):
    """f_0: backbone and normalisation as they were, never trained, saved along so that a resumed run has them."""

    def __init__(self, model: Embedder, labels: Tensor, holdout: float) -> None:
        super().__init__(labels, holdout)
        self.embedder = copy.deepcopy(model)
        self.embedder.head = nn.Identity()
        self.requires_grad_(False).eval()

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        return self.embedder.features(images)


def original(model: Embedder, labels: Tensor, settings: DistilSettings) -> Original:
    """A frozen copy of the model's backbone as it is now."""
    return Original(model, labels, settings.holdout)


def squared_drift(features: Tensor, first: Tensor, scale: Tensor) -> Tensor:
    """‖f_θ(x + δ) − f_0(x)‖² / s of each image, (B, F) to (B,)."""
    return (features - first).square().sum(1) / scale


def scale_of(first: Tensor) -> Tensor:
    """s: the mean of ‖f_0(x)‖² over the batch, so that a drift of 1 is as far as the features are from 0."""
    return first.square().sum(1).mean().clamp(min=torch.finfo(first.dtype).tiny)


def raise_drift(first: Tensor) -> Objective:
    """Climb the squared drift away from the features `first` (U, F); it has no goal, so no unit leaves."""
    scale = scale_of(first)
    return Objective(lambda e, positions: squared_drift(e[:, 0], first[positions], scale))


def distil(step: Step, settings: DistilSettings) -> Iterator[Tensor]:
    """The mean squared drift of the features of x + δ, where δ maximises it; held-out images leave the batch."""
    assert isinstance(step.companion, Original)
    images, _ = step.companion.kept(step)
    if len(images) < 2:  # live BatchNorm has no statistics of one
        return
    with step.precision():
        first = step.see(step.companion, images)
    step = replace(step, model=Through(step.model))
    with step.frozen() as features:
        units = step.perturb(features, images[:, None], raise_drift(first), settings)
    yield squared_drift(step.embed(units[:, 0]), first, scale_of(first)).mean()


def drifts(
    model: Embedder, companion: Original, images: Images, settings: DistilSettings, key: Key, precision: Precision
) -> dict[str, float]:
    """√(Σ ‖f_θ(x') − f_0(x)‖² / Σ ‖f_0(x)‖²) over held-out images, x' clean and attacked: the root of the loss."""

    def goal(views: Tensor, labels: Tensor) -> Objective:
        return raise_drift(companion(views))

    sums = torch.zeros(3, dtype=torch.float64)
    for found in measured(Through(model), companion.held, images, goal, settings, key, precision):
        with precise():
            first = companion(found.views).double()
        moved = [(features.double() - first).square().sum() for features in (found.clean, found.attacked)]
        sums += torch.stack([*moved, first.square().sum()]).cpu()
    clean, attacked = (sums[:2] / sums[2]).sqrt().tolist()
    return {"drift": clean, "drift_attacked": attacked}
