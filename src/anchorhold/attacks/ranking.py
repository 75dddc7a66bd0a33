"""Attacks on ranks: candidates raised or lowered in the lists of chosen queries (CA), and queries perturbed so
that chosen candidates rise or sink in their lists (QA). Zhou et al., ECCV 2020; the robust-init study, eq. 3.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import check
from ..geometry import distance_matrix, distance_rows, ranks
from ..perturb.problem import Objective
from ..random import Key
from .goal import Goal, Scene, Side, aimed, neighbours

__all__ = ["CandidateAttack", "QueryAttack", "hinge", "sinking", "top_size"]


def hinge(to_target: Tensor, to_gallery: Tensor, raised: bool, margin: float = 0.0) -> Tensor:
    """Mean over targets and gallery of max(0, ±(d(target) − d(x)) + β): 0 once the target is first, or last.

    `to_target` is (N, T); `to_gallery` (N, G), or (N, T, G) where each target has its own list.

    >>> hinge(torch.tensor([[1.0]]), torch.tensor([[0.5, 2.0]]), raised=True)
    tensor([0.2500])
    """
    lists = to_gallery if to_gallery.ndim == 3 else to_gallery.unsqueeze(1)
    gap = to_target.unsqueeze(2) - lists
    # relu, not clamp: its slope at zero is zero, so a sample that met its goal has no gradient at all.
    return F.relu((gap if raised else -gap) + margin).mean((1, 2))


def top_size(gallery: int) -> int:
    """The number of neighbours in the top 1 %, at least 2 (more than 1 % where the gallery is below 200)."""
    return max(2, int(0.01 * gallery))


@dataclass(frozen=True, kw_only=True)
class CandidateAttack(Goal):
    """CA+ / CA-: perturb a gallery item c so that it rises to the top / sinks to the bottom for `w` queries q.

    CA+ minimises mean over q, x of max(0, d(q, c') − d(q, x) + β), CA- of max(0, d(q, x) − d(q, c') + β); x runs
    through the whole clean gallery. Queries are drawn uniformly for CA+, with replacement from c's own nearest
    1 % for CA-. The measure is the rank of c' as a fraction of the list: how many items are strictly nearer
    to q. Published, they include q's own image and the clean c. Corrected, c' replaces c, and q's own image is not in
    q's list.
    """

    side: ClassVar[Side] = "gallery"
    raised: bool
    w: int = 1
    margin: float = 0.0
    counts_self: bool = False

    def __post_init__(self) -> None:
        check(self.w >= 1, f"w must be at least 1, got {self.w}")

    @property
    def name(self) -> str:
        return "CA+" if self.raised else "CA-"

    @property
    def run(self) -> tuple[object, ...]:
        return self.name, self.w, self.margin

    def targets(self, scene: Scene, ids: Tensor, key: Key) -> Tensor:
        share = key(self.name).uniform(ids, (self.w,))
        if self.raised:
            return (share * len(scene.queries)).long()
        size = top_size(len(scene.queries))
        near = neighbours(scene.gallery[ids], scene.queries, size, scene.query_of(ids))
        return near.gather(1, (share * near.shape[1]).long())

    def objective(self, scene: Scene, ids: Tensor, targets: Tensor | None) -> Objective:
        query = scene.queries[aimed(targets)]  # (N, W, D)
        lists = distance_matrix(query.flatten(0, 1), scene.gallery).unflatten(0, query.shape[:2])

        def value(e: Tensor, positions: Tensor) -> Tensor:
            return -hinge(_pairs(e[:, 0], query[positions]), lists[positions], self.raised, self.margin)

        # CA+ cannot be met: the query's own image lies at distance 0.
        return Objective(value, top=None if self.raised else 0.0)

    @torch.no_grad()
    def measure(
        self, scene: Scene, ids: Tensor, targets: Tensor | None, embeddings: Tensor, early: Tensor | None = None
    ) -> dict[str, Tensor]:
        asked = aimed(targets)
        flat = asked.flatten()
        candidate, query = ids.repeat_interleave(self.w), scene.queries[flat]
        changed = embeddings.repeat_interleave(self.w, 0)
        moved = (changed != scene.gallery[candidate]).any(1, keepdim=True)
        own = torch.full_like(flat, -1) if self.counts_self else scene.own[flat]
        rank = torch.empty(len(flat), dtype=torch.float64, device=query.device)
        for rows, distances in distance_rows(query, scene.gallery):
            # A candidate that did not move ties with itself. Computed separately, rounding would decide that tie.
            still = distances.gather(1, candidate[rows, None])
            reach = torch.where(moved[rows], _pairs(changed[rows], query[rows].unsqueeze(1)), still)
            nearer = distances < reach
            if not self.counts_self:
                nearer.scatter_(1, candidate[rows, None], False)
                known = (own[rows] >= 0).nonzero().squeeze(1)
                nearer[known, own[rows][known]] = False
            rank[rows] = nearer.sum(1).double()
        # Corrected: all items without the clean c and q's own image, plus c' itself.
        total = len(scene.gallery) - (0 if self.counts_self else ((own >= 0) & (own != candidate)).double())
        return {self.name: (rank / total).reshape(asked.shape).mean(1)}


@dataclass(frozen=True, kw_only=True)
class QueryAttack(Goal):
    """QA+ / QA-: perturb a query q so that `m` candidates c rise to the top / sink to the bottom of its list.

    QA+ minimises mean over c, x of max(0, d(q', c) − d(q', x)), QA- of max(0, d(q', x) − d(q', c)); x runs through
    the whole gallery. Candidates are drawn uniformly for QA+, without replacement from q's own nearest 1 % for
    QA-. The measure is the 0-based rank of c as a fraction of the list; published, q's own image is in that list.
    """

    raised: bool
    m: int = 1
    counts_self: bool = False

    def __post_init__(self) -> None:
        check(self.m >= 1, f"m must be at least 1, got {self.m}")

    @property
    def name(self) -> str:
        return "QA+" if self.raised else "QA-"

    @property
    def run(self) -> tuple[object, ...]:
        return self.name, self.m

    def targets(self, scene: Scene, ids: Tensor, key: Key) -> Tensor:
        key = key(self.name)
        if self.raised:
            return (key.uniform(ids, (self.m,)) * len(scene.gallery)).long()
        size = top_size(len(scene.gallery))
        near = neighbours(scene.queries[ids], scene.gallery, size, scene.own[ids])
        check(self.m <= near.shape[1], f"QA- draws {self.m} of the {near.shape[1]} nearest candidates; lower m")
        return near.gather(1, key.uniform(ids, (near.shape[1],)).argsort(1)[:, : self.m])

    def objective(self, scene: Scene, ids: Tensor, targets: Tensor | None) -> Objective:
        return sinking(scene.gallery, aimed(targets), self.raised)

    def measure(
        self, scene: Scene, ids: Tensor, targets: Tensor | None, embeddings: Tensor, early: Tensor | None = None
    ) -> dict[str, Tensor]:
        chosen, own = aimed(targets), None if self.counts_self else scene.own[ids]
        rank = ranks(embeddings, scene.gallery, chosen, exclude=own).double()
        # A candidate that is q's own image stays in the list, although q's own image is left out otherwise.
        absent = 0 if own is None else ((own >= 0).unsqueeze(1) & (own.unsqueeze(1) != chosen)).double()
        return {self.name: (rank / (len(scene.gallery) - absent)).mean(1)}


def sinking(gallery: Tensor, targets: Tensor, raised: bool = False) -> Objective:
    """Climb until the gallery items `targets` (N, M) are last in the perturbed sample's list, or first."""

    def value(e: Tensor, positions: Tensor) -> Tensor:
        distances = distance_matrix(e[:, 0], gallery)
        return -hinge(distances.gather(1, targets[positions]), distances, raised)

    return Objective(value, top=0.0)


def _pairs(x: Tensor, y: Tensor) -> Tensor:
    """d(x_i, y_ij), (N, D) and (N, T, D) to (N, T), computed like the distances they are compared with."""
    count, each = y.shape[:2]
    matrix = distance_matrix(x, y.flatten(0, 1))
    columns = torch.arange(count * each, device=x.device).reshape(count, each)
    return matrix.gather(1, columns)
