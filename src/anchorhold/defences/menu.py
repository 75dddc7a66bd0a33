"""Defences by name. Each is a generator `defence(step, settings)`; every `yield loss` is one optimiser step.

A defence whose settings extend `Inner` perturbs images. With eps and steps 0 it is the same step on clean images.
Benign batches (`train.benign`) are made this way.

To add one: write `defences/NAME.py` with the generator, its settings in `settings.py`, and a line here and there.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from .act import anti_collapse
from .adml import adversarial_metric_learning
from .est import embedding_shifted, revised_embedding_shifted, suppressed_shift
from .free import free_hardness_manipulation
from .hardness import hardness_manipulation
from .madry import adversarial_training
from .natural import natural
from .own import OWN
from .proxy import class_proxies
from .step import Step
from .trades import trades
from .tride import triplet_decoupling

__all__ = ["DEFENCES", "Defence", "defence_named"]

Defence = Callable[[Step, Any], Iterator[Tensor]]

DEFENCES: dict[str, Defence] = {
    "natural": natural,
    "madry": adversarial_training,
    "trades": trades,
    "proxy": class_proxies,
    "hardness": hardness_manipulation,
    "free": free_hardness_manipulation,
    "act": anti_collapse,
    "est": embedding_shifted,
    "ses": suppressed_shift,
    "rest": revised_embedding_shifted,
    "tride": triplet_decoupling,
    "adml": adversarial_metric_learning,
}


def defence_named(name: str) -> Defence:
    """A defence of ours, or one of yours that settings have named."""
    return OWN[name] if name in OWN else DEFENCES[name]
