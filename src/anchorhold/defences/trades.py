"""Training with a loss on clean images and a pull on moved ones, after TRADES (Zhang et al. 2019), for embeddings:

    L(f(x), y) + β · mean ‖f(x + δ) − f(x)‖²,   where δ maximises ‖f(x + δ) − f(x)‖² within the ball.

TRADES has the divergence of class probabilities where this has the squared distance of embeddings. The attack needs no
labels. Distance 0 is stationary, so it starts at random. SES differs by its distance, which is not squared, and by its
start.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..geometry import Distance, cosine, euclidean
from ..perturb.problem import Objective
from .est import move_away
from .settings import TradesSettings
from .step import Step, changed
from .training_loss import batch_loss

__all__ = ["PULLS", "trades"]

PULLS: dict[str, Distance] = {"squared": lambda x, y: euclidean(x, y).square(), "cosine": cosine}


def trades(step: Step, settings: TradesSettings) -> Iterator[Tensor]:
    """The loss of the clean batch + β · mean d(e(x'), e(x)), with gradient through both embeddings."""
    images, pull = step.batch.images, PULLS[settings.shift]
    with step.frozen() as embed:
        goal: Objective = move_away(step.see(embed, images), pull)
        moved = step.perturb(embed, images[:, None], goal, settings)[:, 0]
    step.trains_on(torch.arange(len(images)).repeat(2))
    clean, there = step.embed(torch.cat([images, moved])).chunk(2)
    step.log_shift(clean.detach(), there, 1, clean.detach(), changed(images, moved))
    yield batch_loss(step, settings, clean) + settings.beta * pull(there, clean).mean()
