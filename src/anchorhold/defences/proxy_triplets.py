"""Triplets on top of class proxies: of the images that the form embeds, or perturbed by hardness manipulation.

With `triplet_attack = hm` the batch's triplets are perturbed as in HM[sampler, LGA] (Zhou & Patel 2022), with the ε,
the steps and the schedule of the defence, from the clean images. They are embedded besides the images of the form.
"""

from dataclasses import replace

import torch
from torch import Tensor

from .. import losses
from ..model.frozen import Embed
from ..triplets import hardness
from .hardness import Source, destination_of, raise_hardness
from .proxy_settings import ProxySettings
from .settings import HardnessSettings
from .step import Step

__all__ = ["perturbed_triplets", "triplets_of_images", "triplets_of_units"]

MEMORY = "previous_loss"  # of LGA, in the state


def perturbed_triplets(step: Step, settings: ProxySettings, embed: Embed, known: Tensor) -> tuple[Tensor, Tensor]:
    """Positions (T, 3) in the batch, and images (T, 3, C, H, W) as hard as LGA allows; `known` (B, D) is clean."""
    by = HardnessSettings(settings.sampler, "lga", margin=settings.triplet_margin)
    chosen = step.mine(by.source, known, by.margin, "triplets")
    triplets = torch.stack([chosen.anchor, chosen.positive, chosen.negative], dim=1)
    before = known[triplets]
    source = Source(triplets, known, before, hardness(*before.unbind(1)))
    # A random start would move triplets that are at their goal already.
    inner = replace(settings.at(step.progress), start="zero", stationary=False)
    goal = raise_hardness(destination_of(step, by, source, MEMORY))
    step.log("hardness_before", source.hardness.mean())
    return triplets, step.perturb(embed, step.batch.images[triplets], goal, inner, embedded=before)


def triplets_of_units(step: Step, settings: ProxySettings, after: Tensor) -> Tensor:
    """L_T of perturbed triplets (T, 3, D), which is LGA's previous loss in the next step."""
    a, p, n = after.unbind(1)
    loss = losses.triplet(a, p, n, settings.triplet_margin)
    step.state[MEMORY] = loss.detach()
    step.log("hardness_after", hardness(a, p, n).detach().mean())
    return loss


def triplets_of_images(step: Step, settings: ProxySettings, e: Tensor) -> Tensor:
    """L_T of triplets that are mined on embeddings (B, D) of the whole batch."""
    margin = settings.triplet_margin
    chosen = step.mine(settings.sampler, e.detach(), margin, "triplets")
    return losses.triplet(e[chosen.anchor], e[chosen.positive], e[chosen.negative], margin)
