"""Targeted mismatch: make an image look like an arbitrary other one (Tolias et al., ICCV 2019)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import DataError
from ..geometry import cosine
from ..perturb.problem import Objective
from ..random import Key
from .goal import Goal, Scene, aimed

__all__ = ["MismatchAttack"]


@dataclass(frozen=True, kw_only=True)
class MismatchAttack(Goal):
    """TMA: climb cos(q', t) to a gallery item t drawn uniformly.

    In the published evaluator t may be q's own image, once in G draws. Here it never is, in either protocol, so that
    one run serves both.
    """

    @property
    def name(self) -> str:
        return "TMA"

    def targets(self, scene: Scene, ids: Tensor, key: Key) -> Tensor:
        own, total = scene.own[ids], len(scene.gallery)
        share = key(self.name).uniform(ids)
        if total == 1 and bool((own >= 0).any()):
            raise DataError("TMA needs another image to aim at; give a gallery of at least 2 images")
        # The query's own image is excluded: draws at or above its id shift up by one.
        drawn = (share * torch.where(own >= 0, total - 1, total)).long()
        return drawn + ((own >= 0) & (drawn >= own))

    def objective(self, scene: Scene, ids: Tensor, targets: Tensor | None) -> Objective:
        target = scene.gallery[aimed(targets)]
        return Objective(lambda e, positions: -cosine(e[:, 0], target[positions]))

    @torch.no_grad()
    def measure(
        self, scene: Scene, ids: Tensor, targets: Tensor | None, embeddings: Tensor, early: Tensor | None = None
    ) -> dict[str, Tensor]:
        return {"TMA": 1 - cosine(embeddings, scene.gallery[aimed(targets)]).double()}
