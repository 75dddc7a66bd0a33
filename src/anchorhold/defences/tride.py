"""Collapse-aware triplet decoupling (CA-TRIDE, Tian et al. 2024): candidates and anchors in alternate batches.

CAP perturbs positives and negatives, ANP the anchors. Both raise the batch's collapseness C towards 0, where
training would collapse, and stop there. C couples the triplets, so the batch moves as a whole or not at all. Only one
kind of member moves, so it moves further than when all three share the shift.

Paper and published code disagree. `form` chooses one, and `FORMS` lists the differences.

The paper calls the method plug-and-play (4.6): `sampler` may be any, and `ics` adds the intra-class structure term to
batches whose anchors move. It leaves an adaptive λ for the future, since its three λ follow the entanglement of the
data sets (table 5). With `adaptive` λ follows that of the clean batches, measured in training.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import losses
from ..geometry import distance_matrix, euclidean
from ..perturb.problem import Objective, Value
from ..triplets import collapseness, hardness
from .hardness import intra_class
from .settings import TrideSettings
from .step import Step, changed

__all__ = [
    "FORMS",
    "Form",
    "anp_loss",
    "anp_loss_as_coded",
    "entanglement",
    "move_anchor",
    "move_candidates",
    "nearest_part",
    "top_rank_loss",
    "triplet_decoupling",
]

USUAL_ENTANGLEMENT = 0.787  # of CUB, 0.226 / 0.287 in table 5, where λ is 10
SMOOTHING = 0.1  # weight of a batch in the running mean of the entanglement
PERTURBED = {"cap": [1, 2], "anp": [0]}  # which of (a, p, n) a phase perturbs


def anp_loss(c: Tensor, top_rank: Tensor) -> Tensor:
    """−C + Δ_TR with Δ_TR = e^max(C, 0) · top_rank, Tian et al. 2024, eqs. 11 and 12 before the hinge.

    `top_rank` is d(A, N_v) − d(A, A_0). The factor is a constant.

    >>> anp_loss(torch.tensor(-0.5), torch.tensor(0.25))
    tensor(0.7500)
    """
    return -c + c.detach().clamp(min=0).exp() * top_rank


def anp_loss_as_coded(c: Tensor, top_rank: Tensor) -> Tensor:
    """max(C, 0) + e^min(C, 0) · max(top_rank, 0), as the published code has it: C is lowered, never raised."""
    return torch.relu(c) + c.detach().clamp(max=0).exp() * torch.relu(top_rank)


@dataclass(frozen=True)
class Form:
    """The differences between paper and published code. The share n/N of the training counts epochs from `first`."""

    first: int
    far: bool  # C is weighted towards far pairs
    anp: Callable[[Tensor, Tensor], Tensor]
    narrowing: Callable[[float], float]  # factor of the semihard window, from the share n/N
    top_rank_in_cap: bool  # CAP batches train with L_TR too
    enough: float  # the attack stops for the batch once its loss is at most this
    leaves: bool  # ANP's first step also climbs the sum of the coordinates, an effect of torch's 1e-6 in d(A, A_0)


FORMS: dict[str, Form] = {
    "paper": Form(1, False, anp_loss, lambda share: 1 - (share / 2) ** 2, False, 0.0, False),  # its eq. 32
    "code": Form(0, True, anp_loss_as_coded, lambda share: (1 - share / 2) ** 2, True, 1e-5, True),
}


def nearest_part(distances: Tensor, share: float = 0.5) -> Tensor:
    """Mean of the smaller half: d(A, N_v) or d(A, P_v) of Tian et al. 2024, eqs. 12 and 13, from the batch's own pairs.

    `share` is that of the pairs that count, half of them in the paper; rounded down, at least one.

    >>> nearest_part(torch.tensor([3.0, 1.0, 2.0, 9.0]))
    tensor(1.5000)
    """
    return distances.topk(max(int(len(distances) * share), 1), largest=False).values.mean()


def top_rank_loss(positive: Tensor, negative: Tensor, beta: float = 0.04, share: float = 0.5) -> Tensor:
    """max(0, d(A, P_v) − d(A, N_v) + β_TR), Tian et al. 2024, eq. 13 without its γ."""
    return torch.relu(nearest_part(positive, share) - nearest_part(negative, share) + beta)


def entanglement(embeddings: Tensor, labels: Tensor, ids: Tensor) -> Tensor:
    """d_intra / d_inter: mean distances within and between classes (Tian et al. 2024, table 5); NaN without a pair.

    An image that the batch has twice makes no pair.

    >>> entanglement(torch.tensor([[0.0], [1.0], [4.0]]), torch.tensor([0, 0, 1]), torch.arange(3))
    tensor(0.2857)
    """
    d, same = distance_matrix(embeddings, embeddings), labels.unsqueeze(1) == labels
    within, between = same & (ids.unsqueeze(1) != ids), ~same
    return (d * within).sum() / within.sum() / ((d * between).sum() / between.sum())


def share_done(settings: TrideSettings, epoch: int, epochs: int) -> float:
    """n/N, the finished share of the training."""
    return (epoch + FORMS[settings.form].first) / epochs


def window_at(settings: TrideSettings, epoch: int, epochs: int) -> float:
    """η = η_0 (1 − (n/2N)²) (Tian et al. 2024, eq. 32), or η_0 (1 − n/2N)² as coded."""
    return settings.window * FORMS[settings.form].narrowing(share_done(settings, epoch, epochs))


def weighted_collapseness(settings: TrideSettings, positive: Tensor, negative: Tensor) -> Tensor:
    """C of d(a_i, p_i) and d(a_i, n_i), with the weights of this form."""
    far, carry = FORMS[settings.form].far, settings.weights_carry_gradient
    return collapseness(positive, negative, settings.attention, far=far, carry=carry)


def raised(settings: TrideSettings, positive: Tensor, negative: Tensor) -> Tensor:
    """The quantity that the attack raises."""
    if settings.guide == "hardness":
        return (positive - negative).mean()
    return weighted_collapseness(settings, positive, negative)


def hinged(settings: TrideSettings, loss: Tensor) -> Tensor:
    """max(loss, 0), with a gradient of exactly zero where the attack stops; without `stop`, the loss itself."""
    return torch.where(loss > FORMS[settings.form].enough, loss, 0.0) if settings.stop else loss


def move_candidates(anchor: Tensor, settings: TrideSettings) -> Objective:
    """CAP: climb −max(−C, 0) (Tian et al. 2024, eq. 10) with units (p, n) against fixed anchors (U, D)."""

    def loss(e: Tensor, positions: Tensor) -> Tensor:
        positive, negative = euclidean(anchor[positions].unsqueeze(1), e).unbind(1)
        return hinged(settings, -raised(settings, positive, negative))

    return _lower(loss, settings)


def move_anchor(clean: Tensor, settings: TrideSettings) -> Objective:
    """ANP: climb −max(−C + Δ_TR, 0) (Tian et al. 2024, eq. 11) with units (a,) among triplets `clean` (U, 3, D)."""
    form = FORMS[settings.form]

    def loss(e: Tensor, positions: Tensor, moved: bool = True) -> Tensor:
        itself, positive, negative = euclidean(e, clean[positions]).unbind(1)
        if not moved:
            along = e[:, 0].sum(1) / e.shape[-1] ** 0.5
            itself = along - along.detach() if form.leaves else torch.zeros_like(itself)
        top_rank = negative.new_zeros(())
        if settings.top_rank_term:
            top_rank = nearest_part(negative, settings.top_share) - itself.mean()
        return hinged(settings, form.anp(raised(settings, positive, negative), top_rank))

    # Before the first step d(A, A_0) is 0, and its direction would be rounding error. In the code's form it is the only
    # gradient of anchors beyond the nearest half, so the first step sets it explicitly.
    return _lower(loss, settings, first=lambda e, positions: -loss(e, positions, moved=False))


def _lower(loss: Value, settings: TrideSettings, first: Value | None = None) -> Objective:
    """Climb −loss, for the whole batch until its loss is 0."""
    return Objective(
        lambda e, positions: -loss(e, positions), first=first, coupled=True, top=0.0 if settings.stop else None
    )


def triplet_decoupling(step: Step, settings: TrideSettings) -> Iterator[Tensor]:
    """Perturb candidates or anchors of semihard triplets; train with L_T, after ANP + L_TR (eq. 14)."""
    images, form, phase = step.batch.images, FORMS[settings.form], _phase(step, settings)
    structure = settings.ics if phase == "anp" else 0.0  # ICS needs an adversarial anchor
    members = PERTURBED[phase]
    share = share_done(settings, step.epoch, step.epochs) if settings.progressive else 1.0
    with step.frozen() as embed:
        clean = step.see(embed, images)
        settings = _adapted(step, settings, clean)
        window = window_at(settings, step.epoch, step.epochs)
        chosen = step.mine(settings.sampler, clean, window, **settings.mining)
        triplets = torch.stack([chosen.anchor, chosen.positive, chosen.negative], dim=1)
        before = clean[triplets]
        goal = move_candidates(before[:, 0], settings) if phase == "cap" else move_anchor(before, settings)
        units = images[triplets]
        inner = replace(settings, alpha=share * settings.alpha)
        units[:, members] = step.perturb(embed, units[:, members], goal, inner, embedded=before[:, members])
        perturbed = changed(images[triplets], units)
    if structure:
        units, triplets = torch.cat([units, images[triplets[:, :2]]], 1), torch.cat([triplets, triplets[:, :2]], 1)
    step.trains_on(triplets)
    after = step.embed(units.flatten(0, 1)).unflatten(0, triplets.shape)
    a, p, n, *unmoved = after.unbind(1)
    after = after[:, :3] if unmoved else after
    loss = losses.triplet(a, p, n, settings.margin)
    if settings.top_rank_loss and (phase == "anp" or form.top_rank_in_cap):
        loss = loss + settings.gamma * top_rank_loss(*_distances(after), settings.beta, settings.top_share)
    if unmoved:
        term = intra_class(unmoved[0], a, unmoved[1])
        step.log("ics", term.detach())
        loss = loss + structure * term
    for name, e in (("before", before), ("after", after.detach())):
        step.log(f"hardness_{name}", hardness(*e.unbind(1)).mean())
        step.log(f"collapseness_{name}", weighted_collapseness(settings, *_distances(e)))
    # A mean over both phases alone would hide a weak phase.
    step.also_as(phase).log_shift(before[:, members], after[:, members], len(members), clean, perturbed)
    yield loss


def _phase(step: Step, settings: TrideSettings) -> str:
    """This batch's phase."""
    if settings.phases != "both":
        return settings.phases
    return "anp" if step.anchors_turn() else "cap"


def _adapted(step: Step, settings: TrideSettings, clean: Tensor) -> TrideSettings:
    """The settings with the λ of this batch: λ + adaptive · (running mean of the entanglement − CUB's), at least 0."""
    if not settings.adaptive:
        return settings
    found = entanglement(clean, step.batch.labels, step.batch.ids).double()
    known = step.state.get("entanglement")
    if known is not None:
        known = known.to(found)
        found = torch.where(found.isfinite(), known + SMOOTHING * (found - known), known)
    if not bool(found.isfinite()):  # no batch so far had pairs of both kinds
        return settings
    step.state["entanglement"] = found
    attention = max(settings.attention + settings.adaptive * (float(found) - USUAL_ENTANGLEMENT), 0.0)
    step.log("entanglement", found)
    step.log("attention", attention)
    return replace(settings, attention=attention)


def _distances(triplets: Tensor) -> tuple[Tensor, Tensor]:
    """d(a_i, p_i) and d(a_i, n_i) of embedded triplets (U, 3, D)."""
    positive, negative = euclidean(triplets[:, :1], triplets[:, 1:]).unbind(1)
    return positive, negative
