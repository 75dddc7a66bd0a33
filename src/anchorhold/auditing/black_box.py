"""Audits without gradients: the methods that use values only, and the words for them."""

from torch import nn

from ..errors import check
from ..model.no_gradients import gives_gradients
from ..perturb.settings import VALUES_ONLY

__all__ = ["QUERIES", "how_attacked", "queried"]

QUERIES = 1000  # of one image for one goal, where no number is given


def queried(model: nn.Module, method: str, steps: int | None) -> tuple[str, int | None]:
    """The method and its steps for a model: Square in place of PGD where it gives no gradients.

    Steps of Square and NES are queries.
    """
    if not gives_gradients(model):
        check(
            method in ("pgd", *VALUES_ONLY),
            f"method {method!r} needs gradients, and this model gives none: use {' or '.join(VALUES_ONLY)}",
        )
        method = "square" if method == "pgd" else method
    return method, QUERIES if method in VALUES_ONLY and steps is None else steps


def how_attacked(model: nn.Module, method: str, steps: int) -> tuple[str, ...]:
    """Notes on gradients for the result: none were taken, or they are those of a stand-in."""
    notes = tuple(getattr(model, "remarks", ()))
    if method in VALUES_ONLY:
        notes += (f"attacked without gradients: {method}, up to {steps:,} queries for each image and attack",)
    return notes
