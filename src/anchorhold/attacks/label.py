"""003's attacks on the label that a nearest neighbour predicts: away from it (equation 5), or to a chosen one (6).

Both are problems of the smallest norm. At a given ε, `attack` says whether it suffices; `smallest_norms` searches for
the smallest ε of each sample.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..geometry import distance_matrix, retrieve
from ..model.frozen import Embed
from ..perturb.ascend import Budget, Objective
from ..perturb.ball import Ball
from ..perturb.minnorm import smallest_eps
from ..random import Key
from ..settings import check
from .goal import Goal, Scene, aimed
from .run import attack

__all__ = ["LabelAttack", "predicted", "smallest_norms"]

SLACK = 1e-4  # a win must survive fp32 noise between the ascent and the measurement


def predicted(scene: Scene, ids: Tensor, embeddings: Tensor) -> Tensor:
    """lb(A, z) (N,): the label of the nearest item, a query's own image apart (003, section 3.2)."""
    return scene.gallery_labels[retrieve(embeddings, scene.gallery, 1, exclude=scene.own[ids]).ids[:, 0]]


@dataclass(frozen=True, kw_only=True)
class LabelAttack(Goal):
    """untargeted: lb(A, z + δ) ≠ lb(A, z) (003, eq. 5); targeted: lb(A, z + δ) = t ≠ lb(A, z), t uniform (eq. 6).

    Climbed is min d(label) − min d(other labels) for the predicted label, the reverse for the target. Measured is
    whether the sample withstood: still has its label, or has not the target's. `targets` are labels. No evaluator of
    it was published, so both protocols agree.
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
        # One less to choose from: whatever lies from the predicted label upwards moves up by one.
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
            return (outside - inside if self.targeted else inside - outside).clamp(max=SLACK)

        return Objective(value, top=SLACK)

    def measure(
        self, scene: Scene, ids: Tensor, targets: Tensor | None, embeddings: Tensor, early: Tensor | None = None
    ) -> dict[str, Tensor]:
        has = predicted(scene, ids, embeddings) == aimed(targets)
        return {self.name: (~has if self.targeted else has).double()}

    def success(self, measures: dict[str, Tensor]) -> Tensor:
        return measures[self.name] < 0.5


def smallest_norms(
    embed: Embed,
    images: Tensor,
    scene: Scene,
    goal: Goal,
    ids: Tensor,
    key: Key,
    *,
    norm: str = "linf",
    highest: float = 64 / 255,
    searches: int = 8,
    budget: Budget | None = None,
) -> Tensor:
    """(N,) min μ(δ) that reaches the goal (003, equations 5 and 6): the smallest ε at which it is reached."""
    way = budget or Budget(50, start="random", restarts=3, keep="best", rule="apgd")
    aims = goal.targets(scene, ids, key)

    def succeeds(eps: float, which: Tensor) -> Tensor:
        at = which.to(ids.device)
        ball = Ball(eps, norm)  # type: ignore[arg-type]  # it checks the name
        done = attack(
            embed, images[at], scene, goal, ids[at], ball, way, key, targets=None if aims is None else aims[at]
        )
        won = done.success
        check(won is not None, f"{goal.name} has no goal that is reached or not, so no smallest norm")
        assert won is not None
        return won

    return smallest_eps(succeeds, len(ids), highest, searches)
