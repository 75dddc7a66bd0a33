"""Natural training: the loss on clean images. It is the baseline of every defence."""

from collections.abc import Iterator

from torch import Tensor

from .settings import NaturalSettings
from .step import Step
from .training_loss import batch_loss

__all__ = ["natural"]


def natural(step: Step, settings: NaturalSettings) -> Iterator[Tensor]:
    """L_T(a, p, n; γ) = max(0, d(a,p) − d(a,n) + γ), Zhou & Patel 2022, eq. 1, on triplets of the clean batch.

    With a loss of yours: that loss of the clean batch.
    """
    yield batch_loss(step, settings, step.embed(step.batch.images))
