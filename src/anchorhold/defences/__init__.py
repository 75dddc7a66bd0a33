"""The menu of defences: a generator that yields losses, and its frozen settings.

A defence whose settings extend `Inner` perturbs images. With eps and steps 0 it is the same step on clean images:
that is what a benign batch is (`train.benign`).

To add one: write `defences/NAME.py` with a frozen settings dataclass and a generator `defence(step, settings)`,
and add a line here. Each `yield loss` is one optimiser step.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .act import ActSettings, anti_collapse
from .adml import AdmlSettings, adversarial_metric_learning
from .classify import ClassifySettings, accuracies, classifier, classify
from .distil import DistilSettings, distil, drifts, original
from .est import (
    EstSettings,
    RestSettings,
    SesSettings,
    embedding_shifted,
    revised_embedding_shifted,
    suppressed_shift,
)
from .hardness import HardnessSettings, hardness_manipulation
from .natural import NaturalSettings, natural
from .step import Batch, Inner, Step
from .tride import TrideSettings, triplet_decoupling

__all__ = ["DEFENCES", "Batch", "Defence", "Inner", "Step"]


@dataclass(frozen=True)
class Defence:
    """A generator that yields losses, and the dataclass of its settings."""

    run: Callable[[Step, Any], Iterator[Tensor]]
    settings: type[Any]
    # Made once from (model, labels of the training split, settings), trained and saved along: `step.companion`.
    companion: Callable[[Any, Tensor, Any], nn.Module] | None = None
    # What is looked at instead of retrieval: (model, companion, training images, settings, key, precision) to numbers.
    look: Callable[..., dict[str, float]] | None = None
    # Settings that others have and that make no sense here, each with the reason.
    refused: Mapping[str, str] = field(default_factory=dict)


_NO_DESTINATION = {"boost": "g_B raises a destination hardness, which defence.name=hardness alone has"}
_CLEAN_ANCHOR = _NO_DESTINATION | {"ics": "ICS needs an adversarial anchor, and here the anchor stays clean"}
_NO_ICS = _NO_DESTINATION | {"ics": "ICS belongs to hardness manipulation, defence.name=hardness"}


DEFENCES = {
    "natural": Defence(natural, NaturalSettings, refused=_CLEAN_ANCHOR),
    "hardness": Defence(hardness_manipulation, HardnessSettings),
    "act": Defence(anti_collapse, ActSettings, refused=_CLEAN_ANCHOR),
    "est": Defence(embedding_shifted, EstSettings, refused=_NO_ICS),
    "ses": Defence(suppressed_shift, SesSettings, refused=_NO_ICS),
    "rest": Defence(revised_embedding_shifted, RestSettings, refused=_CLEAN_ANCHOR),
    "tride": Defence(triplet_decoupling, TrideSettings, refused=_NO_ICS),
    "adml": Defence(adversarial_metric_learning, AdmlSettings, refused=_NO_ICS),
    "classify": Defence(classify, ClassifySettings, classifier, accuracies),
    "distil": Defence(distil, DistilSettings, original, drifts),
}
