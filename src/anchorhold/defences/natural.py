"""Natural training: the loss on clean images. It is the baseline of every defence."""

from collections.abc import Iterator

from torch import Tensor

from .. import losses
from .settings import NaturalSettings
from .step import Step

__all__ = ["natural"]


def natural(step: Step, settings: NaturalSettings) -> Iterator[Tensor]:
    """L_T(a, p, n; γ) = max(0, d(a,p) − d(a,n) + γ), Zhou & Patel 2022, eq. 1, on triplets of the clean batch."""
    embeddings = step.embed(step.batch.images)
    chosen = step.mine(settings.sampler, embeddings.detach(), settings.margin)
    a, p, n = (embeddings[index] for index in (chosen.anchor, chosen.positive, chosen.negative))
    yield losses.LOSSES[settings.loss](a, p, n, settings.margin)
