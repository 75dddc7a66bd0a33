"""Pretrainings by name: each makes robust weights, from which a defence can start."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..defences.menu import Defence
from .classify import accuracies, classifier, classify
from .distil import distil, drifts, original
from .soft_labels import agreements, distil_logits, teacher

__all__ = ["PRETRAININGS", "Pretraining"]


@dataclass(frozen=True)
class Pretraining:
    """A generator of losses, as a defence is, with its companion and its evaluation."""

    run: Defence
    # Made once from (model, labels of the training split, settings); trained and saved with the model.
    companion: Callable[[Any, Tensor, Any], nn.Module]
    # Numbers on held-out images, from (model, companion, training images, settings, key, precision).
    measure: Callable[..., dict[str, float]]


PRETRAININGS = {
    "classify": Pretraining(classify, classifier, accuracies),
    "distil": Pretraining(distil, original, drifts),
    "distil-logits": Pretraining(distil_logits, teacher, agreements),
}
