"""Hardness manipulation (paper 001): raise a triplet's hardness to a chosen destination, then train on it.

HM[H_S, H_D] perturbs anchor, positive and negative to minimise ‖max(0, H_D − H)‖² (equation 3), where
H = d(a,p) − d(a,n). A triplet at or above its destination has zero gradient and stays as it is.

H_D is the hardness of other clean triplets, a constant (2, the upper bound, is min-max training), or the linear
gradual adversary g_LGA. g_B raises the first two as the loss falls. ICS adds to the loss what keeps an anchor nearer
to its adversarial counterpart than to the positive.

Two things are not in print. `rise` makes a destination that is relative to the source, so that no triplet is there
before it begins. `members` leaves some of the three clean: those that move then go further, as in CA-TRIDE, but every
triplet to its own destination.
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
ALL = slice(0, 3)  # of (a, p, n)
PERTURBED = {"all": ALL, "candidates": slice(1, 3), "anchors": slice(0, 1)}
FIRST_LOSS = 2.0  # the previous loss before there is one: anything ≥ γ makes LGA and g_B start at their gentlest


@dataclass(frozen=True)
class HardnessSettings(Inner):
    """HM[source, destination] of 001's tables; the default is HM[S, LGA] with 8 steps."""

    source: str = "softhard"
    destination: float | str = "lga"  # a sampler, a constant in [-2, 2] (2 is min-max), or lga
    margin: float = 0.2
    boost: float = 0.0  # ξ of g_B, 0.1 in print; 0 leaves the destination as it is
    rise: float = 0.0  # added to a sampler's hardness; over the source's own sampler the destination is relative to it
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
        check(0 <= self.rise <= 4, f"rise is added to a hardness in [-2, 2]: between 0 and 4, got {self.rise}")
        check(
            not self.rise or self.destination in SAMPLERS,
            f"rise = {self.rise} is added to the hardness of a sampler's triplets: set destination to a sampler",
        )
        words = get_args(Members)
        check(self.members in words, f"members {self.members!r}; {nearest(str(self.members), words)}")
        check(
            not self.ics or self.members in ("all", "anchors"),
            f"ICS needs an adversarial anchor in every batch, and with members = {self.members} some stay clean",
        )
        check(
            self.raises or self.members == "all",
            f"members = {self.members} changes nothing where the destination is the source: raise it by rise or boost",
        )

    @property
    def raises(self) -> bool:
        """Whether anything is perturbed: a destination from the source's own sampler means the same triplets."""
        return self.destination != self.source or bool(self.boost or self.rise)


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


def raise_hardness(destination: Tensor, clean: Tensor | None = None, members: slice = ALL) -> Objective:
    """Climb −max(0, H_D − H)² (001 equation 3); a triplet is done when H ≥ H_D.

    Units hold the perturbed `members` of (a, p, n); the others are those of `clean` (U, 3, D).
    """
    assert clean is not None or members == ALL

    def value(e: Tensor, positions: Tensor) -> Tensor:
        triplet = [] if clean is None else list(clean[positions].unbind(1))
        triplet[members] = e.unbind(1)
        return -(destination[positions] - hardness(*triplet)).clamp(min=0).square()

    return Objective(value, top=0.0)


def hardness_manipulation(step: Step, settings: HardnessSettings) -> Iterator[Tensor]:
    """Perturb the source triplets to their destination and train with L_T, and λ · L_ICS, on the result."""
    images, whose, memory = step.batch.images, str(settings.members), "previous_loss"
    if whose == "turns":  # one kind of member is harder to move than the other, so each has its own loss to follow
        whose = "anchors" if step.anchors_turn() else "candidates"
        step, memory = step.also_as(whose), f"{memory}_{whose}"
    members, previous = PERTURBED[whose], step.state.get(memory, torch.tensor(FIRST_LOSS))
    with step.frozen() as embed:
        clean = step.see(embed, images)
        source = step.mine(settings.source, clean, settings.margin)
        triplets = torch.stack([source.anchor, source.positive, source.negative], dim=1)
        before = clean[triplets]
        source_hardness = hardness(*before.unbind(1))
        units = images[triplets]
        if settings.raises:
            goal = raise_hardness(_destination(step, settings, clean, source_hardness, previous), before, members)
            units[:, members] = step.perturb(embed, units[:, members], goal, settings, embedded=before[:, members])
    if settings.ics:  # the clean anchors and positives go through the model along with the adversarial triplets
        units = torch.cat([units, images[triplets[:, :2]]], dim=1)
    after = step.embed(units.flatten(0, 1)).unflatten(0, (-1, units.shape[1]))
    a, p, n, *unmoved = after.unbind(1)
    loss = losses.triplet(a, p, n, settings.margin)
    step.state[memory] = loss.detach()  # without ICS: its scale is γ's
    step.log("hardness_before", source_hardness.mean())
    step.log("hardness_after", hardness(a.detach(), p.detach(), n.detach()).mean())
    step.log_shift(before[:, members], after[:, members], members.stop - members.start, clean)
    if unmoved:
        anchor, positive = unmoved
        structure = intra_class(anchor, a, positive)
        step.log("ics", structure.detach())
        loss = loss + settings.ics * structure
    yield loss


def _destination(step: Step, settings: HardnessSettings, clean: Tensor, source: Tensor, previous: Tensor) -> Tensor:
    """H_D for each triplet: a constant, the gradual adversary, or the hardness of a clean triplet; then g_B."""
    previous = previous.to(source)
    if settings.destination == "lga":
        return lga(previous, settings.margin).expand_as(source)
    if not isinstance(settings.destination, str):
        found = torch.full_like(source, settings.destination)
    elif settings.destination == settings.source:
        found = source
    else:
        other = step.mine(settings.destination, clean, settings.margin, purpose="destination")
        found = hardness(clean[other.anchor], clean[other.positive], clean[other.negative])
    return boosted(found + settings.rise, previous, settings.margin, settings.boost)
