"""The menu of defences: a generator that yields losses, and its frozen settings.

To add one: write `defences/NAME.py` with a frozen settings dataclass and a generator `defence(step, settings)`,
and add a line here. Each `yield loss` is one optimiser step.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .act import ActSettings, anti_collapse
from .hardness import HardnessSettings, hardness_manipulation
from .natural import NaturalSettings, natural
from .step import Batch, Step

__all__ = ["DEFENCES", "Batch", "Defence", "Step"]


@dataclass(frozen=True)
class Defence:
    """A generator that yields losses, and the dataclass of its settings."""

    run: Callable[[Step, Any], Iterator[Tensor]]
    settings: type[Any]


DEFENCES = {
    "natural": Defence(natural, NaturalSettings),
    "hardness": Defence(hardness_manipulation, HardnessSettings),
    "act": Defence(anti_collapse, ActSettings),
}
