"""Scale-free objectives for all goals: what DLR is to cross-entropy in a classifier.

Distances are roots of differences of large numbers. Their hinges saturate, and all of them shrink with the model's
spread. These objectives use half the squared distance from e to x around the gallery's mean μ, without the part that
all x share,

    h_x(e) = |x − μ|²/2 − ⟨e − μ, x − μ⟩ = (|e − x|² − |e − μ|²) / 2,

which orders a list as distances do. It is divided by its spread over the list, σ(e) = std over x of h_x(e). σ is a
constant in the gradient, or an attack could gain by spreading the list. All objectives are the same for the model
s·f(x) + b (s > 0).

    a wrong neighbour     (min over matches h − min over non-matches h) / σ       ES:R LTM GTM nearest margin labels
    the neighbour leaves  (h_c − 4th smallest h of the others) / σ                GTT
    raise, sink           ∓ mean over x of s((h_c − h_x) / (τ σ)), τ = ½          CA±, QA±: a smooth rank
    look alike            cos(e − μ, t − μ)                                       TMA
    raise or sink, keep   as above for C, and − ξ times the same for S            SPQA±
    move                  −cos(e − μ, q − μ)                                      ES (its distance)

s(z) = ½ (1 + z / (1 + |z|)) is a smooth step. Unlike a sigmoid's, its slope never rounds to 0.
"""

from dataclasses import replace
from functools import singledispatch

import torch
import torch.nn.functional as F
from torch import Tensor

from ..perturb.problem import Objective
from .goal import Goal, Scene, aimed
from .label import LabelAttack
from .mismatch import MismatchAttack
from .preserving import PreservingQueryAttack
from .ranking import CandidateAttack, QueryAttack
from .recall import RETAIN, EmbeddingShift, GreedyTranslocation, RecallGoal

__all__ = ["halves", "scale_free", "spread", "without_end"]

TEMPERATURE = 0.5
SURE = 0.05  # in units of σ: goals are exceeded by this, which is more than the error of bf16


def halves(e: Tensor, items: Tensor, mean: Tensor) -> Tensor:
    """h (N, G): half the squared distances from e (N, D) to items (G, D), without the part that each row shares.

    >>> halves(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), torch.zeros(2))
    tensor([[-0.5000,  1.5000]])
    """
    with torch.autocast(e.device.type, enabled=False):
        centred = items - mean
        away = (e if e.dtype == torch.float64 else e.float()) - mean
        return centred.square().sum(1) / 2 - away @ centred.T


def spread(h: Tensor) -> Tensor:
    """σ (N,) of a list, as a constant."""
    return h.detach().std(-1).clamp(min=torch.finfo(h.dtype).tiny)


def _rank(gap: Tensor) -> Tensor:
    """Mean s(gap) (N,) of (N, T, G): the share of the list that lies before the targets."""
    return (0.5 * (1 + F.softsign(gap))).mean((1, 2))


@singledispatch
def scale_free(goal: Goal, scene: Scene, ids: Tensor, targets: Tensor | None) -> Objective:
    """The scale-free objective of a goal; your own goals keep their objective unless you register one here."""
    return goal.objective(scene, ids, targets)


@scale_free.register
def wrong_neighbour(goal: RecallGoal, scene: Scene, ids: Tensor, targets: Tensor | None) -> Objective:
    """(min over matches h − min over non-matches h) / σ; above 0 the nearest neighbour is wrong."""
    return _first_of_another(scene, scene.labels[ids], scene.own[ids])


@scale_free.register
def other_label(goal: LabelAttack, scene: Scene, ids: Tensor, targets: Tensor | None) -> Objective:
    """The same for the predicted label, or towards the target's."""
    labels = aimed(targets)
    return _first_of_another(scene, labels, scene.own[ids], -1.0 if goal.targeted else 1.0)


def _first_of_another(scene: Scene, labels: Tensor, own: Tensor, sign: float = 1.0, most: float = SURE) -> Objective:
    mean, items = scene.gallery.mean(0), torch.arange(len(scene.gallery), device=scene.gallery.device)

    def value(e: Tensor, positions: Tensor) -> Tensor:
        h = halves(e[:, 0], scene.gallery, mean)
        match, itself = labels[positions, None] == scene.gallery_labels, own[positions, None] == items
        nearest_match = h.masked_fill(~match | itself, torch.inf).amin(1)
        nearest_other = h.masked_fill(match | itself, torch.inf).amin(1)
        return (sign * (nearest_match - nearest_other) / spread(h)).clamp(max=most)

    return Objective(value, top=most)


@scale_free.register
def leaves(
    goal: GreedyTranslocation, scene: Scene, ids: Tensor, targets: Tensor | None, most: float = SURE
) -> Objective:
    """(h_c − 4th smallest h of the others) / σ; above 0 the candidate is not among the first four."""
    mean, items = scene.gallery.mean(0), torch.arange(len(scene.gallery), device=scene.gallery.device)
    candidate, own = aimed(targets), scene.own[ids]

    def value(e: Tensor, positions: Tensor) -> Tensor:
        h = halves(e[:, 0], scene.gallery, mean)
        chosen = candidate[positions, None]
        others = h.masked_fill((chosen == items) | (own[positions, None] == items), torch.inf)
        last = others.topk(min(RETAIN, h.shape[1]), dim=1, largest=False).values[:, -1]
        # With fewer than four others the candidate cannot drop out: there is nothing to climb.
        gap = (h.gather(1, chosen)[:, 0] - last).nan_to_num(neginf=0.0)
        return (gap / spread(h)).clamp(max=most)

    return Objective(value, top=most)


@scale_free.register
def query_rank(goal: QueryAttack, scene: Scene, ids: Tensor, targets: Tensor | None) -> Objective:
    """∓ mean over c and x of s((h_c − h_x) / (τ σ)): the smooth rank of the candidates in q's list."""
    mean, chosen = scene.gallery.mean(0), aimed(targets)
    sign = -1.0 if goal.raised else 1.0

    def value(e: Tensor, positions: Tensor) -> Tensor:
        h = halves(e[:, 0], scene.gallery, mean)
        gap = h.gather(1, chosen[positions]).unsqueeze(2) - h.unsqueeze(1)
        return sign * _rank(gap / (TEMPERATURE * spread(h)[:, None, None]))

    return Objective(value, goal.objective(scene, ids, targets).goal)


@scale_free.register
def preserving_rank(goal: PreservingQueryAttack, scene: Scene, ids: Tensor, targets: Tensor | None) -> Objective:
    """The same for the candidates, minus ξ times the smooth rank of the items that are to be kept."""
    mean, chosen = scene.gallery.mean(0), aimed(targets)
    sign = -1.0 if goal.raised else 1.0

    def value(e: Tensor, positions: Tensor) -> Tensor:
        h = halves(e[:, 0], scene.gallery, mean)
        gap = (h.gather(1, chosen[positions]).unsqueeze(2) - h.unsqueeze(1)) / (TEMPERATURE * spread(h)[:, None, None])
        return sign * _rank(gap[:, : goal.m]) - goal.weight * _rank(gap[:, goal.m :])

    return Objective(value)


@scale_free.register
def candidate_rank(goal: CandidateAttack, scene: Scene, ids: Tensor, targets: Tensor | None) -> Objective:
    """The smooth rank of the candidate c' in the list of each query it aims at."""
    mean = scene.gallery.mean(0)
    query = scene.queries[aimed(targets)]  # (N, W, D)
    lists = halves(query.flatten(0, 1), scene.gallery, mean).unflatten(0, query.shape[:2])
    unit, sign = TEMPERATURE * spread(lists), -1.0 if goal.raised else 1.0

    def value(e: Tensor, positions: Tensor) -> Tensor:
        with torch.autocast(e.device.type, enabled=False):
            away = e[:, 0].to(mean.dtype) - mean
            reach = away.square().sum(1, keepdim=True) / 2 - ((query[positions] - mean) * away[:, None]).sum(2)
            gap = reach.unsqueeze(2) - lists[positions]
            return sign * _rank(gap / unit[positions].unsqueeze(2))

    return Objective(value, goal.objective(scene, ids, targets).goal)


@scale_free.register
def look_alike(goal: MismatchAttack, scene: Scene, ids: Tensor, targets: Tensor | None) -> Objective:
    """cos(e − μ, t − μ)."""
    return _centred_cosine(scene, scene.gallery[aimed(targets)], 1.0)


@scale_free.register
def move(goal: EmbeddingShift, scene: Scene, ids: Tensor, targets: Tensor | None) -> Objective:
    """−cos(e − μ, q − μ)."""
    return _centred_cosine(scene, scene.queries[ids], -1.0)


def without_end(goal: Goal, scene: Scene, ids: Tensor, targets: Tensor | None) -> Objective:
    """The same without early stop: marginal perturbations do not transfer to another model."""
    if isinstance(goal, GreedyTranslocation):
        found = leaves(goal, scene, ids, targets, most=torch.inf)
    elif isinstance(goal, LabelAttack):
        sign = -1.0 if goal.targeted else 1.0
        found = _first_of_another(scene, aimed(targets), scene.own[ids], sign, most=torch.inf)
    elif isinstance(goal, RecallGoal) and not isinstance(goal, EmbeddingShift):
        found = _first_of_another(scene, scene.labels[ids], scene.own[ids], most=torch.inf)
    else:
        found = scale_free(goal, scene, ids, targets)
    return replace(found, done=None, top=None)


def _centred_cosine(scene: Scene, towards: Tensor, sign: float) -> Objective:
    mean = scene.gallery.mean(0)

    def value(e: Tensor, positions: Tensor) -> Tensor:
        with torch.autocast(e.device.type, enabled=False):
            return sign * F.cosine_similarity(e[:, 0].to(mean.dtype) - mean, towards[positions] - mean, dim=1)

    return Objective(value)
