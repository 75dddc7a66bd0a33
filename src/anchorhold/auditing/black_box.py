"""Audits without gradients: the methods that use values only, and the words for them."""

from torch import nn

from ..errors import check
from ..interface import argument
from ..model.no_gradients import gives_gradients
from ..perturb.settings import VALUES_ONLY

__all__ = ["how_attacked", "usable"]


def usable(model: nn.Module, method: str) -> str:
    """The method for a model: Square in place of PGD where it gives no gradients."""
    if not gives_gradients(model):
        check(
            method in ("pgd", *VALUES_ONLY),
            f"{argument('method')} {method!r} needs gradients, and the model has none: use {' or '.join(VALUES_ONLY)}",
        )
        return "square" if method == "pgd" else method
    return method


def how_attacked(model: nn.Module, method: str, steps: int) -> tuple[str, ...]:
    """Notes on gradients for the result: none were taken, or they are those of a stand-in."""
    notes = tuple(getattr(model, "remarks", ()))
    if method in VALUES_ONLY:
        notes += (f"attacked without gradients: {method}, up to {steps:,} queries for each image and attack",)
    return notes
