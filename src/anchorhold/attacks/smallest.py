"""The smallest ε at which an attack reaches its goal (ADML, equations 5 and 6), found by bisection with any method.

    min μ(δ) such that lb(A, z + δ) ≠ lb(A, z)    (equation 5; `untargeted`)
    min μ(δ) such that lb(A, z + δ) = t           (equation 6; `targeted`)

An attack is a heuristic. The ε found is an upper bound of the smallest norm: a stronger attack may find a smaller one.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..device import precise
from ..errors import SettingsError, check
from ..interface import argument
from ..model.frozen import embed_all
from ..perturb.cw import bracketed_eps
from ..perturb.settings import Budget
from .run import Attack

__all__ = ["Smallest", "smallest_attacks"]


class Smallest(NamedTuple):
    """What a search found for each sample (N,)."""

    eps: Tensor  # smallest ε that sufficed; inf where none did, 0 where the clean sample meets the goal
    failed: Tensor  # largest ε below it that did not suffice
    images: Tensor  # (N, …) perturbed at `eps`; clean where `eps` is 0 or inf
    norms: Tensor  # ‖x' − x‖ of them, at most `eps`
    checked: Tensor  # whether they, embedded anew in full precision, meet the goal
    image_steps: int
    queries: int


def smallest_attacks(
    attack: Attack,
    images: Tensor,
    ids: Tensor,
    *,
    budget_at: Callable[[float], Budget],
    highest: float = 64 / 255,
    searches: int = 10,
) -> Smallest:
    """Search for the smallest ε of each sample, from 0 to `highest`.

    Args:
        attack: goal, scene and method. Its ball gives the norm; its ε and its budget are not used.
        images: (N, …) the samples.
        ids: (N,) their positions on the goal's side of the scene.
        budget_at: the steps at an ε. Steps of a fixed length would leave a small ball at once.
        highest: upper end of the search.
        searches: halvings. The bracket is highest/2^searches wide.
    """
    check(highest > 0, f"the search needs an upper end above 0, got {highest:g}")
    check(1 <= searches <= 40, f"{argument('searches')} must be from 1 to 40, got {searches}")
    goal, ids = attack.goal, ids.to(attack.scene.gallery.device)
    aims, best = goal.targets(attack.scene, ids, attack.key), images.clone()
    clean, cost = attack.scene.clean(goal.side)[ids], [0, 0]

    def met(embeddings: Tensor, which: Tensor) -> Tensor:
        aimed = None if aims is None else aims[which]
        early = embeddings if goal.looks_back else None
        won = goal.success(goal.measure(attack.scene, ids[which], aimed, embeddings, early))
        if won is None:
            raise SettingsError(f"{goal.name} is never reached or missed, so it has no smallest ε: choose another goal")
        return won

    def succeeds(eps: float, which: Tensor) -> Tensor:
        at = which.to(ids.device)
        if not eps:  # measured, not attacked: no method needs to cope with an empty ball
            return met(clean[at], at)
        one = replace(attack, ball=replace(attack.ball, eps=eps), budget=goal.prepare(budget_at(eps)))
        done = one.run(images[at], ids[at], len(at), targets=None if aims is None else aims[at])
        cost[0], cost[1] = cost[0] + done.image_steps, cost[1] + done.queries
        won = done.success
        assert won is not None  # `met` has refused such goals at ε = 0
        best[at[won]] = done.images[won]
        return won

    failed, eps = bracketed_eps(succeeds, len(ids), highest, searches)
    with precise(), torch.no_grad():
        # One at a time: in a batch of another size rounding may differ.
        anew = torch.cat([embed_all(attack.embed, [image[None]]) for image in best])
        checked = met(anew, torch.arange(len(ids), device=ids.device)).cpu()
    shift = (best - images).flatten(1).double()
    norms = torch.linalg.vector_norm(shift, ord=torch.inf if attack.ball.norm == "linf" else 2, dim=1).cpu()
    return Smallest(eps, failed, best, norms, checked, *cost)
