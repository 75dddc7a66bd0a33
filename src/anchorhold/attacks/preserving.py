"""SP-QA: a query attack that keeps the rest of the list plausible (Zhou et al., ECCV 2020; RobRank's SPQA)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import check
from ..geometry import distance_matrix
from ..perturb.problem import Objective
from ..random import Key
from .goal import Scene, aimed, neighbours
from .ranking import QueryAttack, hinge, top_size

__all__ = ["PreservingQueryAttack"]

MOST = 1e9  # of the published weight


@dataclass(frozen=True, kw_only=True)
class PreservingQueryAttack(QueryAttack):
    """SPQA+ / SPQA-: QA+ / QA- on `m` candidates C, while `kept_items` items S of the top of the list stay there.

    It minimises L_QA±(C, q') + ξ L_QA+(S, q'). S are the first items of q's own list, q's image apart; for SPQA- the
    first ones of the top 1 % that were not drawn as candidates. As described, ξ is the constant `weight`. Published, ξ
    is min(exp(rate · L_QA+(S, q')), 10⁹), a constant in the gradient, so that leaving the top soon costs more than any
    candidate gains. The published rate depends on the data: 2·10⁴ for MNIST, 4·10⁴ for Fashion-MNIST and CUB, 7·10⁴ for
    CARS and SOP. Here ξ is of each query, not of a batch.

    The measures are the rank of C as in QA ("SPQA+"), and that of S ("SPQA+:kept"), which is near 0 where S was kept.
    """

    kept_items: int = 5
    weight: float = 1.0
    rate: float = 4e4
    grows: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.kept_items >= 1, f"kept_items must be at least 1, got {self.kept_items}")
        check(self.weight >= 0, f"weight must not be negative, got {self.weight:g}")
        check(self.rate >= 0, f"rate must not be negative, got {self.rate:g}")

    @property
    def name(self) -> str:
        return "SPQA+" if self.raised else "SPQA-"

    @property
    def run(self) -> tuple[object, ...]:
        return self.name, self.m, self.kept_items, self.grows, self.rate if self.grows else self.weight

    def targets(self, scene: Scene, ids: Tensor, key: Key) -> Tensor:
        """(N, m + kept_items): the candidates, then the items to keep."""
        drawn = super().targets(scene, ids, key)
        whole = len(scene.gallery)
        reach = self.kept_items if self.raised else max(top_size(whole), self.m + self.kept_items)
        near = neighbours(scene.queries[ids], scene.gallery, reach, scene.own[ids])
        if not self.raised:  # the candidates come from the same list: what is left of it, in order
            taken = (near.unsqueeze(2) == drawn.unsqueeze(1)).any(2)
            near = near.gather(1, taken.long().sort(dim=1, stable=True).indices)
        check(
            near.shape[1] - (0 if self.raised else self.m) >= self.kept_items,
            f"{self.name} keeps {self.kept_items} items besides {self.m} candidates, of {whole}: lower kept_items",
        )
        return torch.cat([drawn, near[:, : self.kept_items]], 1)

    def objective(self, scene: Scene, ids: Tensor, targets: Tensor | None) -> Objective:
        chosen = aimed(targets)

        def value(e: Tensor, positions: Tensor) -> Tensor:
            distances = distance_matrix(e[:, 0], scene.gallery)
            candidates, kept = distances.gather(1, chosen[positions]).split([self.m, self.kept_items], 1)
            lost = hinge(kept, distances, raised=True)
            return -hinge(candidates, distances, self.raised) - self.balance(lost) * lost

        return Objective(value)

    def balance(self, lost: Tensor) -> Tensor:
        """ξ (N,) for a loss of the kept items."""
        if not self.grows:
            return torch.full_like(lost, self.weight)
        return torch.exp(self.rate * lost.detach().double()).clamp(max=MOST).to(lost.dtype)

    def measure(
        self, scene: Scene, ids: Tensor, targets: Tensor | None, embeddings: Tensor, early: Tensor | None = None
    ) -> dict[str, Tensor]:
        candidates, kept = aimed(targets).split([self.m, self.kept_items], 1)
        rank = super().measure(scene, ids, candidates, embeddings)[self.name]
        return {self.name: rank, f"{self.name}:kept": super().measure(scene, ids, kept, embeddings)[self.name]}
