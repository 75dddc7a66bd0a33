"""Natural training: the loss on clean images. The baseline, and what every defence becomes without its attack."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from .. import losses
from ..settings import check, nearest
from ..triplets import SAMPLERS
from .step import Step

__all__ = ["NaturalSettings", "natural"]


@dataclass(frozen=True)
class NaturalSettings:
    """N/A[sampler] in the papers' tables."""

    sampler: str = "random"
    loss: str = "triplet"  # or contrastive, whose margin in the papers is 1.0
    margin: float = 0.2

    def __post_init__(self) -> None:
        check(self.sampler in SAMPLERS, f"no sampler {self.sampler!r}; {nearest(self.sampler, SAMPLERS)}")
        check(self.loss in losses.LOSSES, f"no loss {self.loss!r}; {nearest(self.loss, losses.LOSSES)}")
        check(self.margin >= 0, f"the margin must not be negative, got {self.margin}")


def natural(step: Step, settings: NaturalSettings) -> Iterator[Tensor]:
    """L_T(a, p, n; γ) = max(0, d(a,p) − d(a,n) + γ), 001 equation 1, on triplets of the clean batch."""
    embeddings = step.embed(step.batch.images)
    chosen = step.mine(settings.sampler, embeddings.detach(), settings.margin)
    a, p, n = (embeddings[index] for index in (chosen.anchor, chosen.positive, chosen.negative))
    yield losses.LOSSES[settings.loss](a, p, n, settings.margin)
