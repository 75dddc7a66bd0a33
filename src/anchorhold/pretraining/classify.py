"""Adversarial training on labels: how the robust ImageNet networks of the robust-init study are made.

A linear classifier on the pooled features learns the labels of perturbed images, min_θ max_δ CE(h(f(x + δ)), y).
Only f is kept: the classifier is a companion, and the embedding head is not trained.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.images import Images
from ..defences.step import Step
from ..model.embedder import Embedder
from ..perturb.problem import Objective
from ..random import Key
from .features import Companion, Precision, Through, measured
from .settings import ClassifySettings

__all__ = ["Classifier", "accuracies", "classifier", "classify", "raise_cross_entropy"]


class Classifier(Companion):
    """One linear layer from features to logits (B, C), in fp32 also under autocast."""

    classes: Tensor

    def __init__(self, width: int, labels: Tensor, holdout: float, dtype: torch.dtype) -> None:
        super().__init__(labels, holdout)
        self.register_buffer("classes", torch.unique(labels))
        self.linear = nn.Linear(width, len(self.classes), dtype=dtype)
        # Zero needs no random draw and favours no class. The loss is convex in this layer.
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.linear(features)
        return logits if logits.dtype == torch.float64 else logits.float()

    def targets(self, labels: Tensor) -> Tensor:
        """Labels of the split as 0 … C−1."""
        return torch.searchsorted(self.classes, labels)


def classifier(model: Embedder, labels: Tensor, settings: ClassifySettings) -> Classifier:
    """The classifier that is trained along with the model's backbone."""
    return Classifier(model.width, labels, settings.holdout, model.mean.dtype)


def raise_cross_entropy(targets: Tensor) -> Objective:
    """Climb CE(logits, y) = log Σ_c exp z_c − z_y of units of one image; it has no goal, so no unit is dropped."""
    return Objective(lambda e, positions: F.cross_entropy(e[:, 0], targets[positions], reduction="none"))


def classify(step: Step, settings: ClassifySettings) -> Iterator[Tensor]:
    """Cross-entropy of the logits of x + δ, where δ maximises it; held-out images are left out."""
    assert isinstance(step.companion, Classifier)
    images, labels = step.companion.kept(step)
    if len(images) < 2:  # live BatchNorm needs two images
        return
    targets = step.companion.targets(labels)
    step = replace(step, model=Through(step.model, step.companion))
    with step.frozen() as logits:
        units = step.perturb(logits, images[:, None], raise_cross_entropy(targets), settings)
    out = step.embed(units[:, 0])
    step.log("accuracy_training", 100 * (out.detach().argmax(1) == targets).double().mean())
    yield F.cross_entropy(out, targets)


def accuracies(
    model: Embedder, companion: Classifier, images: Images, settings: ClassifySettings, key: Key, precision: Precision
) -> dict[str, float]:
    """Accuracy on held-out images in percent; under attack an image must be right before and after it."""

    def goal(views: Tensor, labels: Tensor) -> Objective:
        return raise_cross_entropy(companion.targets(labels))

    before, after = [], []
    network = Through(model, companion)
    for found in measured(network, companion.held, images, goal, settings, key, precision):
        targets = companion.targets(found.labels)
        before.append(found.clean.argmax(1) == targets)
        after.append(before[-1] & (found.attacked.argmax(1) == targets))
    clean, attacked = (100 * torch.cat(right).double().mean().item() for right in (before, after))
    return {"accuracy": clean, "accuracy_attacked": attacked}
