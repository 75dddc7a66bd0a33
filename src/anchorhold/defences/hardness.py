"""Hardness manipulation (Zhou & Patel 2022): raise a triplet's hardness to a chosen destination, then train on it.

HM[H_S, H_D] perturbs anchor, positive and negative to minimise ‖max(0, H_D − H)‖² (equation 3), where
H = d(a,p) − d(a,n). A triplet at or above its destination has zero gradient and stays as it is.

H_D is the hardness of other clean triplets, a constant (2, the upper bound, is min-max training), or the linear
gradual adversary g_LGA. g_B raises the first two as the loss falls. ICS is a loss term that keeps an anchor nearer to
its adversarial counterpart than to the positive.

The loss may be yours: it then takes the embeddings of the perturbed triplets, (a, p, n) one after the other, with
their labels. The attack stays as it is. LGA and g_B still go by the triplet loss, so that its scale is the margin's.

Some settings are not in the paper. `gradual` gives g another shape than a line, and `u` another onset. `rise` makes the
destination relative to the source, so that no triplet starts at its goal. `members` keeps some of the three
clean: the others then move further, as in CA-TRIDE, but each triplet has its own destination.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import losses
from ..errors import AnchorholdError, SettingsError, check, lacks_memory
from ..extensions import Named, kind_of, reason_of
from ..model.frozen import Embed
from ..perturb.problem import Objective
from ..triplets import hardness
from .settings import HardnessSettings
from .step import Step, changed
from .training_loss import is_yours, loss_of_yours

__all__ = [
    "Source",
    "boosted",
    "destination_of",
    "embedded",
    "hardness_manipulation",
    "intra_class",
    "lga",
    "log_change",
    "loss_of",
    "power_gradual",
    "raise_hardness",
    "sigmoid_gradual",
    "source_of",
    "whose_turn",
]

ALL = slice(0, 3)  # of (a, p, n)
PERTURBED = {"all": ALL, "candidates": slice(1, 3), "anchors": slice(0, 1)}
FIRST_LOSS = 2.0  # the previous loss of the first step: with any value ≥ γ LGA and g_B start at their weakest


def lga(previous_loss: Tensor, margin: float, u: float | None = None) -> Tensor:
    """Linear gradual adversary: g = −γ · min(u, ℓ)/u, by default with u = γ (Zhou & Patel 2022, eq. 7).

    >>> lga(torch.tensor([2.0, 0.1, 0.0]), 0.2)
    tensor([-0.2000, -0.1000, -0.0000])
    """
    if u is None or u == margin:
        return -previous_loss.clamp(0, margin)
    return -margin * previous_loss.clamp(0, u) / u


def power_gradual(previous_loss: Tensor, margin: float, u: float, power: float) -> Tensor:
    """g = −γ · (min(u, ℓ)/u)^k: with k above 1 it rises early in training, below 1 late.

    >>> power_gradual(torch.tensor([2.0, 0.1, 0.0]), 0.2, 0.2, 2.0)
    tensor([-0.2000, -0.0500, -0.0000])
    """
    return -margin * (previous_loss.clamp(0, u) / u).pow(power)


def sigmoid_gradual(previous_loss: Tensor, margin: float, u: float, slope: float) -> Tensor:
    """g = −γ · S(min(u, ℓ)/u), where S(x) is σ(k (x − ½)), shifted and scaled so that S(0) = 0 and S(1) = 1.

    >>> sigmoid_gradual(torch.tensor([2.0, 0.1, 0.0]), 0.2, 0.2, 10.0)
    tensor([-0.2000, -0.1000, -0.0000])
    """
    least = 1 / (1 + math.exp(slope / 2))
    share = previous_loss.clamp(0, u) / u
    return -margin * (torch.sigmoid(slope * (share - 0.5)) - least) / (1 - 2 * least)


def boosted(destination: Tensor, previous_loss: Tensor, u: float, boost: float) -> Tensor:
    """Gradual boost: g_B(H_D) = H_D + ξ · (1 − min(u, ℓ)/u); u is γ in the paper (Zhou & Patel 2022, eq. 6).

    >>> boosted(torch.tensor([-0.1]), torch.tensor(0.05), 0.2, 0.1)
    tensor([-0.0250])
    """
    return destination + boost * (1 - previous_loss.clamp(0, u) / u)


def intra_class(a: Tensor, moved: Tensor, p: Tensor) -> Tensor:
    """Intra-class structure: mean of max(0, d(a, a') − d(a, p)), which λ weighs (Zhou & Patel 2022, eq. 8).

    >>> a, moved, p = torch.tensor([[[0.0]], [[3.0]], [[1.0]]])
    >>> intra_class(a, moved, p)
    tensor(2.)
    """
    return losses.triplet(a, moved, p, 0.0)


def raise_hardness(destination: Tensor, clean: Tensor | None = None, members: slice = ALL) -> Objective:
    """Climb −max(0, H_D − H)² (Zhou & Patel 2022, eq. 3); a triplet is finished when H ≥ H_D.

    Units hold the perturbed `members` of (a, p, n); the other members come from `clean` (U, 3, D).
    """
    assert clean is not None or members == ALL

    def value(e: Tensor, positions: Tensor) -> Tensor:
        triplet = [] if clean is None else list(clean[positions].unbind(1))
        triplet[members] = e.unbind(1)
        return -(destination[positions] - hardness(*triplet)).clamp(min=0).square()

    return Objective(value, top=0.0)


class Source(NamedTuple):
    """The triplets that are to be perturbed."""

    triplets: Tensor  # (U, 3) positions in the batch
    clean: Tensor  # (B, D) the batch's embeddings
    before: Tensor  # (U, 3, D) those of the triplets
    hardness: Tensor  # (U,)


def source_of(step: Step, settings: HardnessSettings, embed: Embed) -> Source:
    """Draw the source triplets on the clean batch."""
    clean = step.see(embed, step.batch.images)
    source = step.mine(settings.source, clean, settings.margin, **settings.mining)
    triplets = torch.stack([source.anchor, source.positive, source.negative], dim=1)
    before = clean[triplets]
    return Source(triplets, clean, before, hardness(*before.unbind(1)))


def whose_turn(step: Step, settings: HardnessSettings) -> tuple[Step, slice, str]:
    """The step, the members of (a, p, n) that move in this batch, and the name of their previous loss in the state."""
    whose, memory = str(settings.members), "previous_loss"
    if whose == "turns":  # candidates and anchors differ in how easily they move, so each keeps its own previous loss
        whose = "anchors" if step.anchors_turn() else "candidates"
        step, memory = step.also_as(whose), f"{memory}_{whose}"
    return step, PERTURBED[whose], memory


def embedded(step: Step, settings: HardnessSettings, units: Tensor, triplets: Tensor) -> Tensor:
    """The perturbed triplets (U, 3, D) as they train; with ICS (U, 5, D), the clean anchors and positives last."""
    if settings.ics:  # clean anchors and positives go through the model together with the adversarial triplets
        units = torch.cat([units, step.batch.images[triplets[:, :2]]], dim=1)
    step.trains_on(torch.cat([triplets, triplets[:, :2]], dim=1) if settings.ics else triplets)
    out: Tensor = step.embed(units.flatten(0, 1)).unflatten(0, (-1, units.shape[1]))
    return out


def loss_of(step: Step, settings: HardnessSettings, after: Tensor, triplets: Tensor, memory: str) -> Tensor:
    """What trains: L_T of `embedded` triplets, or a loss of yours, and λ · L_ICS."""
    a, p, n, *unmoved = after.unbind(1)
    loss = losses.triplet(a, p, n, settings.margin)
    step.state[memory] = loss.detach()  # without ICS, and whatever loss trains, so that its scale is that of γ
    if is_yours(settings):
        loss = loss_of_yours(step, after[:, ALL].flatten(0, 1), step.batch.labels[triplets].flatten())
    if unmoved:
        anchor, positive = unmoved
        structure = intra_class(anchor, a, positive)
        step.log("ics", structure.detach())
        loss = loss + settings.ics * structure
    return loss


def hardness_manipulation(step: Step, settings: HardnessSettings) -> Iterator[Tensor]:
    """Perturb the source triplets to their destination and train with L_T, and λ · L_ICS, on the result."""
    step, members, memory = whose_turn(step, settings)
    with step.frozen() as embed:
        source = source_of(step, settings, embed)
        triplets, before = source.triplets, source.before
        units = step.batch.images[triplets]
        if settings.raises:
            goal = raise_hardness(destination_of(step, settings, source, memory), before, members)
            units[:, members] = step.perturb(embed, units[:, members], goal, settings, embedded=before[:, members])
        perturbed = changed(step.batch.images[triplets], units)
    after = embedded(step, settings, units, triplets)
    loss = loss_of(step, settings, after, triplets, memory)
    log_change(step, source, after, members, perturbed)
    yield loss


def log_change(step: Step, source: Source, after: Tensor, members: slice, perturbed: Tensor) -> None:
    """Log hardness before and after the attack, and how far embeddings moved."""
    step.log("hardness_before", source.hardness.mean())
    step.log("hardness_after", hardness(*after[:, ALL].detach().unbind(1)).mean())
    count = members.stop - members.start
    step.log_shift(source.before[:, members], after[:, members], count, source.clean, perturbed)


def destination_of(step: Step, settings: HardnessSettings, source: Source, memory: str) -> Tensor:
    """H_D for each triplet: a constant, the gradual adversary, or the hardness of a clean triplet; then g_B."""
    known, clean = source.hardness, source.clean
    previous = step.state.get(memory, torch.tensor(FIRST_LOSS)).to(known)
    if settings.destination == "lga":
        return _gradual(settings, previous).expand_as(known)
    if not isinstance(settings.destination, str):
        found = torch.full_like(known, settings.destination)
    elif settings.at_source:
        found = known
    else:
        other = step.mine(settings.destination, clean, settings.margin, "destination", **settings.mining)
        found = hardness(clean[other.anchor], clean[other.positive], clean[other.negative])
    return boosted(found + settings.rise, previous, settings.onset, settings.boost)


def _gradual(settings: HardnessSettings, previous: Tensor) -> Tensor:
    """g(ℓ) of the previous loss ℓ: a shape of ours, or a function of yours, whose answer is checked."""
    margin, u, shape = settings.margin, settings.onset, settings.gradual
    if not isinstance(shape, Named):
        shapes = {
            "linear": lambda: lga(previous, margin, u),
            "power": lambda: power_gradual(previous, margin, u, settings.power),
            "sigmoid": lambda: sigmoid_gradual(previous, margin, u, settings.slope),
        }
        return shapes[shape]()
    try:
        found = shape.thing(previous, margin)
    except Exception as error:  # user code may raise anything
        if isinstance(error, AnchorholdError) or lacks_memory(error):
            raise
        raise SettingsError(f"the gradual function {shape} fails ({reason_of(error)})") from error
    one = isinstance(found, Tensor | float | int) and (not isinstance(found, Tensor) or found.numel() == 1)
    check(one, f"the gradual function {shape} returns {kind_of(found)}; return one number, the destination H_D")
    value = float(found)
    check(-2 <= value <= 2, f"the gradual function {shape} returns {value:g}; a hardness lies in [-2, 2]")
    return torch.full_like(previous, value)
