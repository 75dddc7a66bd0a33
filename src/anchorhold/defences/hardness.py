"""Hardness manipulation (paper 001): raise a triplet's hardness to a chosen destination, then train on it.

HM[H_S, H_D] perturbs anchor, positive and negative to minimise ‖max(0, H_D − H)‖² (equation 3), where
H = d(a,p) − d(a,n). A triplet at or above its destination has zero gradient and stays as it is.

H_D is the hardness of other clean triplets, a constant (2, the upper bound, is min-max training), or the linear
gradual adversary g_LGA. g_B raises the first two as the loss falls. ICS adds to the loss what keeps an anchor nearer
to its adversarial counterpart than to the positive.

The papers perturb all three members. `members` leaves some of them clean: those that move then go further, as in
CA-TRIDE, but every triplet to its own destination.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from .. import losses
from ..perturb.ascend import Objective
from ..settings import check, nearest
from ..triplets import SAMPLERS, hardness
from .step import Inner, Step

__all__ = ["HardnessSettings", "boosted", "hardness_manipulation", "intra_class", "lga", "raise_hardness"]

Members = Literal["all", "candidates", "anchors", "turns"]
PERTURBED = {"all": slice(0, 3), "candidates": slice(1, 3), "anchors": slice(0, 1)}  # of (a, p, n)
FIRST_LOSS = 2.0  # the previous loss before there is one: anything ≥ γ makes LGA and g_B start at their gentlest


@dataclass(frozen=True)
class HardnessSettings(Inner):
    """HM[source, destination] of 001's tables; the default is HM[S, LGA] with 8 steps."""

    source: str = "softhard"
    destination: float | str = "lga"  # a sampler, a constant in [-2, 2] (2 is min-max), or lga
    margin: float = 0.2
    boost: float = 0.0  # ξ of g_B, 0.1 in print; 0 leaves the destination as it is
    ics: float = 0.0  # λ of the intra-class structure term, 0.5 in print; 0 leaves it out
    members: Members = "all"  # which of (a, p, n) are perturbed; turns: candidates of one batch, anchors of the next

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
        check(self.boost >= 0, f"boost (ξ of g_B) only ever raises a destination: at least 0, got {self.boost}")
        check(
            not self.boost or self.destination != "lga",
            f"boost = {self.boost} (ξ of g_B) needs a destination to raise, and lga is gradual already: "
            "set destination to a sampler or a constant, or boost to 0",
        )
        check(self.ics >= 0, f"ics (λ) is the weight of a loss: at least 0, got {self.ics}")
        words = get_args(Members)
        check(self.members in words, f"members {self.members!r}; {nearest(str(self.members), words)}")
        check(
            not self.ics or self.members != "candidates",
            "ICS needs an adversarial anchor, and with members = candidates the anchor stays clean",
        )


def lga(previous_loss: Tensor, margin: float) -> Tensor:
    """Linear gradual adversary: g = −γ · min(u, ℓ)/u with u = γ (001 equation 7).

    >>> lga(torch.tensor([2.0, 0.1, 0.0]), 0.2)
    tensor([-0.2000, -0.1000, -0.0000])
    """
    return -previous_loss.clamp(0, margin)


def boosted(destination: Tensor, previous_loss: Tensor, margin: float, boost: float) -> Tensor:
    """Gradual boost: g_B(H_D) = H_D + ξ · (1 − min(u, ℓ)/u) with u = γ (001 equation 6).

    >>> boosted(torch.tensor([-0.1]), torch.tensor(0.05), 0.2, 0.1)
    tensor([-0.0250])
    """
    return destination + boost * (1 - previous_loss.clamp(0, margin) / margin)


def intra_class(a: Tensor, moved: Tensor, p: Tensor) -> Tensor:
    """Intra-class structure: mean of max(0, d(a, a') − d(a, p)), which λ weighs (001 equation 8).

    >>> a, moved, p = torch.tensor([[[0.0]], [[3.0]], [[1.0]]])
    >>> intra_class(a, moved, p)
    tensor(2.)
    """
    return losses.triplet(a, moved, p, 0.0)


def raise_hardness(destination: Tensor, clean: Tensor | None = None, members: slice = PERTURBED["all"]) -> Objective:
    """Climb −max(0, H_D − H)² (001 equation 3); a triplet is done when H ≥ H_D.

    Units hold the perturbed `members` of (a, p, n); the others are those of `clean` (U, 3, D).
    """

    def value(e: Tensor, positions: Tensor) -> Tensor:
        triplet = [] if clean is None else list(clean[positions].unbind(1))
        triplet[members] = e.unbind(1)
        return -(destination[positions] - hardness(*triplet)).clamp(min=0).square()

    return Objective(value, top=0.0)


def hardness_manipulation(step: Step, settings: HardnessSettings) -> Iterator[Tensor]:
    """Perturb the source triplets to their destination and train with L_T, and λ · L_ICS, on the result."""
    images, members = step.batch.images, PERTURBED[_whose_turn(step, settings)]
    with step.frozen() as embed:
        clean = step.see(embed, images)
        source = step.mine(settings.source, clean, settings.margin)
        triplets = torch.stack([source.anchor, source.positive, source.negative], dim=1)
        before = clean[triplets]
        source_hardness = hardness(*before.unbind(1))
        units = images[triplets]
        # A destination from the source's own sampler means the same triplets: without a boost, nothing to raise.
        if settings.destination != settings.source or settings.boost:
            goal = raise_hardness(_destination(step, settings, clean, source_hardness), before, members)
            moved = step.perturb(embed, units[:, members], goal, settings, embedded=before[:, members])
            others = (units[:, : members.start], units[:, members.stop :])
            units = moved if settings.members == "all" else torch.cat([others[0], moved, others[1]], dim=1)
    if settings.ics:  # the clean anchors and positives go through the model along with the adversarial triplets
        units = torch.cat([units, images[triplets[:, :2]]], dim=1)
    after = step.embed(units.flatten(0, 1)).unflatten(0, (-1, units.shape[1]))
    a, p, n, *unmoved = after.unbind(1)
    loss = losses.triplet(a, p, n, settings.margin)
    step.state["previous_loss"] = loss.detach()  # without ICS: its scale is γ's
    step.log("hardness_before", source_hardness.mean())
    step.log("hardness_after", hardness(a.detach(), p.detach(), n.detach()).mean())
    step.log_shift(before[:, members], after[:, members], members.stop - members.start, clean)
    if unmoved:
        anchor, positive = unmoved
        structure = intra_class(anchor, a, positive)
        step.log("ics", structure.detach())
        loss = loss + settings.ics * structure
    yield loss


def _whose_turn(step: Step, settings: HardnessSettings) -> str:
    """Which members this batch perturbs."""
    if settings.members != "turns":
        return settings.members
    return "anchors" if step.anchors_turn() else "candidates"


def _destination(step: Step, settings: HardnessSettings, clean: Tensor, source: Tensor) -> Tensor:
    """H_D for each triplet: a constant, the gradual adversary, or the hardness of a clean triplet; then g_B."""
    previous = step.state.get("previous_loss", source.new_tensor(FIRST_LOSS)).to(source.dtype)
    if settings.destination == "lga":
        return lga(previous, settings.margin).expand_as(source)
    if not isinstance(settings.destination, str):
        found = torch.full_like(source, settings.destination)
    elif settings.destination == settings.source:
        found = source
    else:
        other = step.mine(settings.destination, clean, settings.margin, purpose="destination")
        found = hardness(clean[other.anchor], clean[other.positive], clean[other.negative])
    return boosted(found, previous, settings.margin, settings.boost)
