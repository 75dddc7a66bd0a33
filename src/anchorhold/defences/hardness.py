"""Hardness manipulation (paper 001): raise a triplet's hardness to a chosen destination, then train on it.

HM[H_S, H_D] perturbs anchor, positive and negative to minimise ‖max(0, H_D − H)‖² (equation 3), where
H = d(a,p) − d(a,n). A triplet at or above its destination has zero gradient and stays as it is.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import losses
from ..perturb.ascend import Objective
from ..settings import check, nearest
from ..triplets import SAMPLERS, hardness
from .step import Inner, Step

__all__ = ["HardnessSettings", "hardness_manipulation", "lga", "raise_hardness"]

FIRST_LOSS = 2.0  # the previous loss before there is one: anything ≥ γ makes LGA start at its gentlest


@dataclass(frozen=True)
class HardnessSettings(Inner):
    """HM[source, destination] of 001's tables; the default is HM[S, LGA] with 8 steps."""

    source: str = "softhard"
    destination: float | str = "lga"  # a sampler, a constant in [-2, 2] (2 is min-max), or lga
    margin: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.source in SAMPLERS, f"no sampler {self.source!r}; {nearest(self.source, SAMPLERS)}")
        if isinstance(self.destination, str):
            names = [*SAMPLERS, "lga"]
            check(
                self.destination in names,
                f"no destination {self.destination!r}; {nearest(self.destination, names)}",
            )
        else:
            check(
                -2 <= self.destination <= 2,
                f"hardness lies in [-2, 2], so destination = {self.destination} does not",
            )
        check(self.margin > 0, f"LGA scales with the margin, which must be above 0, got {self.margin}")


def lga(previous_loss: Tensor, margin: float) -> Tensor:
    """Linear gradual adversary: g = −γ · min(u, ℓ)/u with u = γ (001 equation 7).

    >>> lga(torch.tensor([2.0, 0.1, 0.0]), 0.2)
    tensor([-0.2000, -0.1000, -0.0000])
    """
    return -previous_loss.clamp(0, margin)


def raise_hardness(destination: Tensor) -> Objective:
    """Climb −max(0, H_D − H)² (001 equation 3); a triplet is done when H ≥ H_D."""

    def value(e: Tensor, positions: Tensor) -> Tensor:
        return -(destination[positions] - hardness(*e.unbind(1))).clamp(min=0).square()

    def done(e: Tensor, positions: Tensor) -> Tensor:
        return hardness(*e.unbind(1)) >= destination[positions]

    return Objective(value, done)


def hardness_manipulation(step: Step, settings: HardnessSettings) -> Iterator[Tensor]:
    """Perturb the source triplets to their destination and train with L_T on the result."""
    with step.frozen() as embed:
        with torch.no_grad():
            clean = embed(step.batch.images)
        source = step.mine(settings.source, clean, settings.margin)
        triplets = torch.stack([source.anchor, source.positive, source.negative], dim=1)
        before = hardness(*clean[triplets].unbind(1))
        units = step.batch.images[triplets]
        # A destination from the source's own sampler means the same triplets: nothing to raise.
        if settings.destination != settings.source:
            goal = raise_hardness(_destination(step, settings, clean, before))
            units = step.perturb(embed, units, goal, settings, embedded=clean[triplets])
    a, p, n = step.embed(units.flatten(0, 1)).unflatten(0, (-1, 3)).unbind(1)
    loss = losses.triplet(a, p, n, settings.margin)
    step.state["previous_loss"] = loss.detach()
    step.log("hardness_before", before.mean())
    step.log("hardness_after", hardness(a.detach(), p.detach(), n.detach()).mean())
    step.log_shift(clean[triplets], torch.stack([a, p, n], dim=1), 3, clean)
    yield loss


def _destination(step: Step, settings: HardnessSettings, clean: Tensor, source: Tensor) -> Tensor:
    """H_D for each triplet: a constant, the gradual adversary, or the hardness of another clean triplet."""
    if not isinstance(settings.destination, str):
        return torch.full_like(source, settings.destination)
    if settings.destination == "lga":
        previous = step.state.get("previous_loss", source.new_tensor(FIRST_LOSS))
        return lga(previous, settings.margin).to(source.dtype).expand_as(source)
    other = step.mine(settings.destination, clean, settings.margin, purpose="destination")
    return hardness(clean[other.anchor], clean[other.positive], clean[other.negative])
