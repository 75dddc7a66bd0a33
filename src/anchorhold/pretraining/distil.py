"""Robust features without labels: perturbed images must keep the features that the clean ones had at the start.

min_θ max_δ ‖f_θ(x + δ) − f_0(x)‖², where f_0 is the network before training. It turns good features into a robust
initialisation (the robust-init study), on any images of the kind that you will search.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..data.images import Images
from ..defences.step import Step
from ..device import precise
from ..model.embedder import Embedder
from ..perturb.problem import Objective
from ..random import Key
from .features import Companion, Precision, Through, measured
from .settings import DistilSettings

__all__ = ["Original", "distil", "drifts", "original", "raise_drift"]


class Original(Companion):
    """f_0: backbone and normalisation before training. They are frozen, and saved so that a resumed run has them."""

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
    """Climb the squared drift away from the features `first` (U, F); it has no goal, so no unit is dropped."""
    scale = scale_of(first)
    return Objective(lambda e, positions: squared_drift(e[:, 0], first[positions], scale))


def distil(step: Step, settings: DistilSettings) -> Iterator[Tensor]:
    """The mean squared drift of the features of x + δ, where δ maximises it; held-out images are left out."""
    assert isinstance(step.companion, Original)
    images, _ = step.companion.kept(step)
    if len(images) < 2:  # live BatchNorm needs two images
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
