"""Collapse-aware triplet decoupling (CA-TRIDE, paper 002): the candidates of one batch, the anchors of the next.

CAP perturbs positives and negatives, ANP the anchors. Both raise the batch's collapseness C towards 0, where
training would collapse, and stop there: C couples the triplets, so the batch moves as a whole or not at all. One
kind of member takes all of the shift, so it goes further than when three share it.

Paper and published code disagree. `form` names the side to follow, and `FORMS` holds what that changes.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from .. import losses
from ..geometry import euclidean
from ..perturb.ascend import Goal, Objective
from ..settings import check, nearest
from ..triplets import collapseness, hardness
from .step import Inner, Step

__all__ = [
    "FORMS",
    "Form",
    "TrideSettings",
    "anp_loss",
    "anp_loss_as_coded",
    "move_anchor",
    "move_candidates",
    "nearest_half",
    "top_rank_loss",
    "triplet_decoupling",
]

MEMBERS = {"cap": [1, 2], "anp": [0]}  # which of (a, p, n) a phase perturbs

Phases = Literal["both", "cap", "anp"]
Guide = Literal["collapseness", "hardness"]
FormName = Literal["paper", "code"]


def anp_loss(c: Tensor, top_rank: Tensor) -> Tensor:
    """−C + Δ_TR with Δ_TR = e^max(C, 0) · top_rank, 002 equations 11 and 12 before the hinge.

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
    """Where paper and published code differ. The share n/N of the training counts epochs from `first`."""

    first: int
    far: bool  # C is weighted towards far pairs
    anp: Callable[[Tensor, Tensor], Tensor]
    narrowing: Callable[[float], float]  # of the semihard window, by the share n/N
    top_rank_in_cap: bool  # CAP batches train with L_TR too
    enough: float  # an attack whose loss is no larger ends for the batch
    leaves: bool  # ANP's first step climbs the sum of the coordinates too, as torch's 1e-6 in d(A, A_0) makes it


FORMS: dict[str, Form] = {
    "paper": Form(1, False, anp_loss, lambda share: 1 - (share / 2) ** 2, False, 0.0, False),  # 002 equation 32
    "code": Form(0, True, anp_loss_as_coded, lambda share: (1 - share / 2) ** 2, True, 1e-5, True),
}


@dataclass(frozen=True, kw_only=True)
class TrideSettings(Inner):
    """CA-TRIDE of 002's tables; the defaults are the paper's for CUB.

    CA-CAP and CA-ANP are `phases`; naive CAP, ANP and TRIDE are guided by hardness, with `stop` and the top-rank
    pair off.
    """

    steps: int = 16
    margin: float = 0.2
    phases: Phases = "both"  # both: batch by batch, CAP first
    guide: Guide = "collapseness"  # hardness: its mean, which is C with λ = 0
    stop: bool = True  # where the hinge is met; off, the attack goes on for all its steps
    attention: float = 10.0  # λ
    weights_carry_gradient: bool = False  # on, the weights of C turn many pairs the wrong way
    top_rank_term: bool = True  # Δ_TR in ANP's attack
    top_rank_loss: bool = True  # L_TR in training
    gamma: float = 0.5  # the coefficient of L_TR
    beta: float = 0.04  # β_TR, the margin of L_TR
    window: float = 0.2  # η_0, how far beyond the positive a semihard negative may lie; it narrows by epoch
    progressive: bool = True  # alpha grows with the epoch, by n/N
    form: FormName = "paper"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kind in (("phases", Phases), ("guide", Guide), ("form", FormName)):
            word, words = getattr(self, name), get_args(kind)
            check(word in words, f"{name} {word!r}; {nearest(str(word), words)}")
        check(0 <= self.attention < math.inf, f"attention (λ) must be finite and not negative, got {self.attention}")
        check(min(self.margin, self.gamma, self.beta) >= 0, "margin, gamma and beta must not be negative")
        check(self.window > 0, f"the window must be above 0, got {self.window}")
        check(
            self.stop or self.form == "paper",
            "without stop the attack raises C as far as it can, and ANP in the code's form lowers it: use form = paper",
        )

    def share(self, epoch: int, epochs: int) -> float:
        """n/N, how much of the training is done."""
        return (epoch + FORMS[self.form].first) / epochs

    def window_at(self, epoch: int, epochs: int) -> float:
        """η = η_0 (1 − (n/2N)²) (002 equation 32), or η_0 (1 − n/2N)² as coded."""
        return self.window * FORMS[self.form].narrowing(self.share(epoch, epochs))

    def collapseness(self, positive: Tensor, negative: Tensor) -> Tensor:
        """C of d(a_i, p_i) and d(a_i, n_i), with the weights of this form."""
        far, carry = FORMS[self.form].far, self.weights_carry_gradient
        return collapseness(positive, negative, self.attention, far=far, carry=carry)

    def raised(self, positive: Tensor, negative: Tensor) -> Tensor:
        """What the attack raises."""
        return (positive - negative).mean() if self.guide == "hardness" else self.collapseness(positive, negative)

    def hinged(self, loss: Tensor) -> Tensor:
        """max(loss, 0), with a gradient of exactly zero where the attack is over; `loss` where it never is."""
        return torch.where(loss > FORMS[self.form].enough, loss, 0.0) if self.stop else loss


def nearest_half(distances: Tensor) -> Tensor:
    """Mean of the smaller half: d(A, N_v) or d(A, P_v) of 002 equations 12 and 13, from the batch's own pairs.

    >>> nearest_half(torch.tensor([3.0, 1.0, 2.0, 9.0]))
    tensor(1.5000)
    """
    return distances.topk(max(len(distances) // 2, 1), largest=False).values.mean()


def top_rank_loss(positive: Tensor, negative: Tensor, beta: float = 0.04) -> Tensor:
    """max(0, d(A, P_v) − d(A, N_v) + β_TR), 002 equation 13 without its γ."""
    return torch.relu(nearest_half(positive) - nearest_half(negative) + beta)


def move_candidates(anchor: Tensor, settings: TrideSettings) -> Objective:
    """CAP: climb −max(−C, 0) (002 equation 10) with units (p, n) against fixed anchors (U, D)."""

    def loss(e: Tensor, positions: Tensor) -> Tensor:
        positive, negative = euclidean(anchor[positions].unsqueeze(1), e).unbind(1)
        return settings.hinged(-settings.raised(positive, negative))

    return _lower(loss, settings)


def move_anchor(clean: Tensor, settings: TrideSettings) -> Objective:
    """ANP: climb −max(−C + Δ_TR, 0) (002 equation 11) with units (a,) among fixed triplets `clean` (U, 3, D)."""
    form = FORMS[settings.form]

    def loss(e: Tensor, positions: Tensor, moved: bool = True) -> Tensor:
        itself, positive, negative = euclidean(e, clean[positions]).unbind(1)
        if not moved:
            along = e[:, 0].sum(1) / e.shape[-1] ** 0.5
            itself = along - along.detach() if form.leaves else torch.zeros_like(itself)
        top_rank = negative.new_zeros(())
        if settings.top_rank_term:
            top_rank = nearest_half(negative) - itself.mean()
        return settings.hinged(form.anp(settings.raised(positive, negative), top_rank))

    # Before anything has moved d(A, A_0) is 0, and its direction would be rounding error. As coded it is the only one
    # that anchors beyond the nearest half have, so there it is named.
    return _lower(loss, settings, first=lambda e, positions: -loss(e, positions, moved=False))


def _lower(loss: Goal, settings: TrideSettings, first: Goal | None = None) -> Objective:
    """Climb −loss, for the whole batch until its loss is 0."""
    return Objective(
        lambda e, positions: -loss(e, positions), first=first, coupled=True, top=0.0 if settings.stop else None
    )


def triplet_decoupling(step: Step, settings: TrideSettings) -> Iterator[Tensor]:
    """Perturb candidates or anchors of semihard triplets and train with L_T, after ANP + L_TR (002 equation 14)."""
    images, form, phase = step.batch.images, FORMS[settings.form], _phase(step, settings)
    members = MEMBERS[phase]
    share = settings.share(step.epoch, step.epochs) if settings.progressive else 1.0
    with step.frozen() as embed:
        clean = step.see(embed, images)
        chosen = step.mine("semihard", clean, settings.window_at(step.epoch, step.epochs))
        triplets = torch.stack([chosen.anchor, chosen.positive, chosen.negative], dim=1)
        before = clean[triplets]
        goal = move_candidates(before[:, 0], settings) if phase == "cap" else move_anchor(before, settings)
        units = images[triplets]
        inner = replace(settings, alpha=share * settings.alpha)
        units[:, members] = step.perturb(embed, units[:, members], goal, inner, embedded=before[:, members])
    after = step.embed(units.flatten(0, 1)).unflatten(0, (-1, 3))
    a, p, n = after.unbind(1)
    loss = losses.triplet(a, p, n, settings.margin)
    if settings.top_rank_loss and (phase == "anp" or form.top_rank_in_cap):
        loss = loss + settings.gamma * top_rank_loss(*_distances(after), settings.beta)
    for name, e in (("before", before), ("after", after.detach())):
        step.log(f"hardness_{name}", hardness(*e.unbind(1)).mean())
        step.log(f"collapseness_{name}", settings.collapseness(*_distances(e)))
    # A mean over both phases alone would hide the one that is weak.
    step.also_as(phase).log_shift(before[:, members], after[:, members], len(members), clean)
    yield loss


def _phase(step: Step, settings: TrideSettings) -> str:
    """This batch's phase."""
    if settings.phases != "both":
        return settings.phases
    return "anp" if step.anchors_turn() else "cap"


def _distances(triplets: Tensor) -> tuple[Tensor, Tensor]:
    """d(a_i, p_i) and d(a_i, n_i) of embedded triplets (U, 3, D)."""
    positive, negative = euclidean(triplets[:, :1], triplets[:, 1:]).unbind(1)
    return positive, negative
