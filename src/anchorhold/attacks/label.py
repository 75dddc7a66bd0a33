"""ADML's attacks on the label that a nearest neighbour predicts: away from it (equation 5), or to a chosen one (6).

Both are problems of the smallest norm. `attack` tells whether a given ε suffices. `smallest_norms` searches for the
smallest ε of each sample.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import check
from ..geometry import distance_matrix, retrieve
from ..perturb.cw import smallest_eps
from ..perturb.problem import Objective
from ..perturb.settings import Budget
from ..random import Key
from .goal import Goal, Scene, aimed
from .recall import WIN_MARGIN
from .run import Attack

__all__ = ["SMALLEST", "LabelAttack", "predicted", "smallest_norms"]


def predicted(scene: Scene, ids: Tensor, embeddings: Tensor) -> Tensor:
    """lb(A, z) (N,): the label of the nearest item, a query's own image apart (ADML, section 3.2)."""
    return scene.gallery_labels[retrieve(embeddings, scene.gallery, 1, exclude=scene.own[ids]).ids[:, 0]]


@dataclass(frozen=True, kw_only=True)
class LabelAttack(Goal):
    """untargeted: lb(A, z + δ) ≠ lb(A, z) (ADML, eq. 5); targeted: lb(A, z + δ) = t ≠ lb(A, z), t uniform (eq. 6).

    The objective is min d(label) − min d(other labels) for the predicted label, and its negative for the target. The
    measure is 1 where the attack failed: the label is kept, or the target's is not reached. `targets` are labels. No
    evaluator of it was published, so both protocols agree.
    """

    targeted: bool

    @property
    def name(self) -> str:
        return "targeted" if self.targeted else "untargeted"

    def targets(self, scene: Scene, ids: Tensor, key: Key) -> Tensor:
        now = predicted(scene, ids, scene.queries[ids])
        if not self.targeted:
            return now
        labels = scene.gallery_labels.unique()
        check(len(labels) > 1, "a targeted attack needs a gallery of at least 2 classes")
        # The predicted label is excluded: draws at or above it shift up by one.
        drawn = key(self.name).integers(ids, len(labels) - 1)
        chosen: Tensor = labels[drawn + (drawn >= torch.searchsorted(labels, now))]
        return chosen

    def objective(self, scene: Scene, ids: Tensor, targets: Tensor | None) -> Objective:
        labels, own = aimed(targets), scene.own[ids]
        items = torch.arange(len(scene.gallery), device=scene.gallery.device)

        def value(e: Tensor, positions: Tensor) -> Tensor:
            distances = distance_matrix(e[:, 0], scene.gallery)
            has, itself = labels[positions, None] == scene.gallery_labels, own[positions, None] == items
            inside = distances.masked_fill(~has | itself, torch.inf).amin(1)
            outside = distances.masked_fill(has | itself, torch.inf).amin(1)
            return (outside - inside if self.targeted else inside - outside).clamp(max=WIN_MARGIN)

        return Objective(value, top=WIN_MARGIN)

    def measure(
        self, scene: Scene, ids: Tensor, targets: Tensor | None, embeddings: Tensor, early: Tensor | None = None
    ) -> dict[str, Tensor]:
        has = predicted(scene, ids, embeddings) == aimed(targets)
        return {self.name: (~has if self.targeted else has).double()}

    def success(self, measures: dict[str, Tensor]) -> Tensor:
        return measures[self.name] < 0.5


SMALLEST = Budget(50, start="random", restarts=3, keep="best", rule="apgd")  # the budget for `smallest_norms`


def smallest_norms(
    attack: Attack, images: Tensor, ids: Tensor, *, highest: float = 64 / 255, searches: int = 8
) -> Tensor:
    """(N,) min μ(δ) that reaches the goal (ADML, eqs. 5 and 6): the smallest ε that suffices.

    `attack` gives everything but ε: its ball gives the norm, and `SMALLEST` is a suitable budget.
    """
    goal, ids = attack.goal, ids.to(attack.scene.queries.device)
    aims = goal.targets(attack.scene, ids, attack.key)

    def succeeds(eps: float, which: Tensor) -> Tensor:
        at = which.to(ids.device)
        one = replace(attack, ball=replace(attack.ball, eps=eps))
        won = one.run(images[at], ids[at], len(at), targets=None if aims is None else aims[at]).success
        check(won is not None, f"{goal.name} has no success criterion, so no smallest norm")
        assert won is not None
        return won

    return smallest_eps(succeeds, len(ids), highest, searches)
