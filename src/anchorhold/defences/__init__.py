"""The menu of defences: a generator that yields losses, and its frozen settings.

A defence whose settings extend `Inner` perturbs images. With eps and steps 0 it is the same step on clean images:
that is what a benign batch is (`train.benign`).

To add one: write `defences/NAME.py` with a frozen settings dataclass and a generator `defence(step, settings)`,
and add a line here. Each `yield loss` is one optimiser step.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .act import ActSettings, anti_collapse
from .hardness import HardnessSettings, hardness_manipulation
from .natural import NaturalSettings, natural
from .step import Batch, Inner, Step

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


DEFENCES = {
    "natural": Defence(natural, NaturalSettings),
    "hardness": Defence(hardness_manipulation, HardnessSettings),
    "act": Defence(anti_collapse, ActSettings),
}
