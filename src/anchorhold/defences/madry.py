"""Min-max training over any loss (Madry et al. 2018): min over θ of max over ‖δ‖ ≤ ε of L(f(x + δ), y).

The attack climbs the loss of the whole batch, in which every image moves. Most losses of metric learning couple the
images of a batch, so the objective is coupled. A miner chooses what trains; the attack climbs the loss without it,
since a miner that finds nothing hard leaves nothing to climb.

`hardness` with destination 2 (the recipe `minmax`) is another one: it climbs the hardness of each triplet on its own.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from .. import losses
from ..perturb.problem import Objective
from .settings import MadrySettings
from .step import Step, changed
from .training_loss import TrainingLoss, batch_loss, is_yours

__all__ = ["adversarial_training", "raise_loss"]


def raise_loss(step: Step, settings: Any, clean: Tensor) -> Objective:
    """Climb the training loss of the batch. Triplets of ours are mined once, on the clean embeddings (B, D)."""
    labels, key = step.batch.labels, step.key("loss")
    if is_yours(settings):
        assert isinstance(step.companion, TrainingLoss)
        loss = step.companion.frozen()
        return Objective(lambda e, positions: loss(e[:, 0], labels, key), coupled=True)
    chosen = step.mine(settings.sampler, clean, settings.margin, **settings.mining)
    a, p, n, of = chosen.anchor, chosen.positive, chosen.negative, losses.LOSSES[settings.loss]
    return Objective(lambda e, positions: of(e[a, 0], e[p, 0], e[n, 0], settings.margin), coupled=True)


def adversarial_training(step: Step, settings: MadrySettings) -> Iterator[Tensor]:
    """Perturb every image of the batch to raise the loss, and train with the same loss on the result."""
    images = step.batch.images
    with step.frozen() as embed:
        clean = step.see(embed, images)
        moved = step.perturb(embed, images[:, None], raise_loss(step, settings, clean), settings)[:, 0]
    e = step.embed(moved)
    step.log_shift(clean, e, 1, clean, changed(images, moved))
    yield batch_loss(step, settings, e)
