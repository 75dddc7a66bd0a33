"""Attacks that make the nearest neighbour wrong, or remove the right one from the top of the list."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import DataError
from ..geometry import distance_matrix, distance_rows, euclidean, ranks, retrieve
from ..metrics import score_queries
from ..model.frozen import embed_all
from ..perturb.ascend import ascend
from ..perturb.problem import Objective, Problem
from ..perturb.settings import Budget
from ..random import Key
from .goal import Goal, Scene, aimed, neighbours, own_ids
from .ranking import sinking

__all__ = [
    "EmbeddingShift",
    "Gallery",
    "GreedyMisranking",
    "GreedyTranslocation",
    "LearningToMisrank",
    "MarginAttack",
    "NearestAttack",
    "RecallGoal",
    "attack_recall",
    "attacked_queries",
    "first_is_right",
    "margin",
]

WIN_MARGIN = 1e-4  # a success must survive fp32 noise between the ascent and the measurement
RETAIN = 4  # GTT's candidate counts as kept while it is among the first 4


@dataclass(frozen=True, kw_only=True)
class RecallGoal(Goal):
    """Goals measured by R@1: does the nearest item, the query's own image apart, have the query's label?"""

    by_position: bool = False  # published: "own image" means the item nearest to the clean embedding

    def right(self, scene: Scene, ids: Tensor, embeddings: Tensor) -> Tensor:
        """(N,) 1 where the nearest neighbour of these embeddings is right, else 0."""
        own = own_ids(scene, ids, self.by_position)
        found = retrieve(
            embeddings,
            scene.gallery,
            1,
            query_labels=scene.labels[ids],
            gallery_labels=scene.gallery_labels,
            exclude=own,
        )
        return found.relevant[:, 0].double()

    def measure(
        self, scene: Scene, ids: Tensor, targets: Tensor | None, embeddings: Tensor, early: Tensor | None = None
    ) -> dict[str, Tensor]:
        """R@1, under the name of the goal."""
        return {self.name: self.right(scene, ids, embeddings)}


@dataclass(frozen=True, kw_only=True)
class EmbeddingShift(RecallGoal):
    """ES: climb d(q', q) to the clean embedding. Measures: that distance (ES:D) and R@1 (ES:R).

    The distance is stationary at the clean image. `opening` says how the attack starts. "sum", a published accident,
    climbs the sum of the coordinates in the first step. "tiny" starts at a random point so near that it only sets a
    direction. Published, ES:D is measured before the last step (4.4 c). A method that keeps its best iterate has no
    such step: `distance` off leaves ES:D out.
    """

    kept: ClassVar[str | None] = "ES:R"
    opening: Literal["sum", "tiny"] = "tiny"
    one_step_early: bool = False
    distance: bool = True

    @property
    def name(self) -> str:
        return "ES"

    @property
    def run(self) -> tuple[object, ...]:
        return self.name, self.opening

    @property
    def looks_back(self) -> bool:
        return self.one_step_early and self.distance

    def prepare(self, budget: Budget) -> Budget:
        tiny = self.opening == "tiny" and budget.start == "zero"
        return replace(budget, start="tiny") if tiny else budget

    def objective(self, scene: Scene, ids: Tensor, targets: Tensor | None) -> Objective:
        clean = scene.queries[ids]
        return Objective(
            lambda e, positions: euclidean(e[:, 0], clean[positions]), first=lambda e, positions: e[:, 0].sum(1)
        )

    @torch.no_grad()
    def measure(
        self, scene: Scene, ids: Tensor, targets: Tensor | None, embeddings: Tensor, early: Tensor | None = None
    ) -> dict[str, Tensor]:
        if self.looks_back and early is None:
            raise DataError("published ES:D is measured before the last step; give the embeddings before that step")
        moved = early if self.looks_back and early is not None else embeddings
        shift = {"ES:D": euclidean(moved, scene.queries[ids]).double()} if self.distance else {}
        return {**shift, "ES:R": self.right(scene, ids, embeddings)}


@dataclass(frozen=True, kw_only=True)
class LearningToMisrank(RecallGoal):
    """LTM: minimise max(0, max over non-matches d(q', x) − min over matches d(q', x)) (Wang et al., CVPR 2020).

    Published, q's own clean image is one of the matches, and the hinge is never met.
    """

    kept: ClassVar[str | None] = "LTM"
    keeps_self: bool = False

    @property
    def name(self) -> str:
        return "LTM"

    @property
    def run(self) -> tuple[object, ...]:
        return self.name, self.keeps_self

    def objective(self, scene: Scene, ids: Tensor, targets: Tensor | None) -> Objective:
        labels = scene.labels[ids]
        own = torch.full_like(scene.own[ids], -1) if self.keeps_self else scene.own[ids]

        def gap(e: Tensor, positions: Tensor) -> Tensor:
            distances = distance_matrix(e[:, 0], scene.gallery)
            match, itself = _matches(scene.gallery_labels, labels[positions], own[positions])
            furthest_other = distances.masked_fill(match, -torch.inf).amax(1)
            return furthest_other - distances.masked_fill(~match | itself, torch.inf).amin(1)

        return Objective(lambda e, positions: -F.relu(gap(e, positions)), top=None if self.keeps_self else 0.0)


@dataclass(frozen=True, kw_only=True)
class GreedyMisranking(RecallGoal):
    """GTM: minimise d(q', t) to the item t of another class that is nearest to q.

    Published, t is another item: see `subset_index`.
    """

    kept: ClassVar[str | None] = "GTM"
    as_coded: bool = False

    @property
    def name(self) -> str:
        return "GTM"

    @property
    def run(self) -> tuple[object, ...]:
        return self.name, self.as_coded

    def targets(self, scene: Scene, ids: Tensor, key: Key) -> Tensor:
        if not self.as_coded:
            return nearest_other(scene, ids)
        nearest = neighbours(scene.queries[ids], scene.gallery, 1, scene.own[ids])[:, 0]
        return subset_index(scene, ids, scene.gallery_labels[nearest], matching=False)

    def objective(self, scene: Scene, ids: Tensor, targets: Tensor | None) -> Objective:
        target = scene.gallery[aimed(targets)]
        return Objective(lambda e, positions: -euclidean(e[:, 0], target[positions]))


def nearest_other(scene: Scene, ids: Tensor) -> Tensor:
    """(N,) the gallery item nearest to each query whose label is not the query's own; -1 where there is none."""
    found = torch.full_like(ids, -1)
    for rows, distances in distance_rows(scene.queries[ids], scene.gallery):
        other = scene.labels[ids[rows], None] != scene.gallery_labels
        nearest = distances.masked_fill_(~other, torch.inf).argmin(1)
        found[rows] = torch.where(other.any(1), nearest, -1)
    return found


def subset_index(scene: Scene, ids: Tensor, labels: Tensor, matching: bool) -> Tensor:
    """(N,) the published bug: among the items with the label (N,), or without it, the index of the nearest.

    It is an index *within that subset*. Used as a gallery id it names another item, unless all items before it are in
    the subset too. The label is that of q's nearest neighbour, not q's own. -1 where the subset is empty.
    """
    found = torch.full_like(ids, -1)
    for rows, distances in distance_rows(scene.queries[ids], scene.gallery, exclude=scene.own[ids]):
        subset = (labels[rows, None] == scene.gallery_labels) == matching
        nearest = distances.masked_fill_(~subset, torch.inf).argmin(1, keepdim=True)
        place = subset.cumsum(1).gather(1, nearest).squeeze(1) - 1
        found[rows] = torch.where(subset.any(1), place, -1)
    return found


@dataclass(frozen=True, kw_only=True)
class GreedyTranslocation(RecallGoal):
    """GTT: sink q's nearest neighbour c, minimising mean over x of max(0, d(q', x) − d(q', c)).

    The measures: is c still among the nearest 4 ("GTT"), and still the nearest ("GTT@1")?
    """

    kept: ClassVar[str | None] = "GTT"

    @property
    def name(self) -> str:
        return "GTT"

    def targets(self, scene: Scene, ids: Tensor, key: Key) -> Tensor:
        return neighbours(scene.queries[ids], scene.gallery, 1, scene.own[ids])[:, 0]

    def objective(self, scene: Scene, ids: Tensor, targets: Tensor | None) -> Objective:
        return sinking(scene.gallery, aimed(targets)[:, None])

    def measure(
        self, scene: Scene, ids: Tensor, targets: Tensor | None, embeddings: Tensor, early: Tensor | None = None
    ) -> dict[str, Tensor]:
        own = own_ids(scene, ids, self.by_position)
        rank = ranks(embeddings, scene.gallery, aimed(targets), exclude=own)
        return {"GTT": (rank < RETAIN).double(), "GTT@1": (rank < 1).double()}


@dataclass(frozen=True, kw_only=True)
class NearestAttack(RecallGoal):
    """ADML's algorithm 1: push q away from its nearest neighbour if that has q's label; else q stays clean.

    The measures are R@1 and mAP@R of the attacked query against the clean gallery. No evaluator of it was published,
    so both protocols agree.
    """

    kept: ClassVar[str | None] = "nearest"

    @property
    def name(self) -> str:
        return "nearest"

    def targets(self, scene: Scene, ids: Tensor, key: Key) -> Tensor:
        nearest = neighbours(scene.queries[ids], scene.gallery, 1, scene.own[ids])[:, 0]
        return torch.where(scene.gallery_labels[nearest] == scene.labels[ids], nearest, -1)

    def objective(self, scene: Scene, ids: Tensor, targets: Tensor | None) -> Objective:
        chosen = aimed(targets)
        target = scene.gallery[chosen.clamp(min=0)]
        left = chosen < 0

        def value(e: Tensor, positions: Tensor) -> Tensor:
            return euclidean(e[:, 0], target[positions]).masked_fill(left[positions], 0)

        return Objective(value, lambda e, positions: left[positions])

    def measure(
        self, scene: Scene, ids: Tensor, targets: Tensor | None, embeddings: Tensor, early: Tensor | None = None
    ) -> dict[str, Tensor]:
        scores = score_queries(
            embeddings,
            scene.labels[ids],
            gallery=scene.gallery,
            gallery_labels=scene.gallery_labels,
            self_ids=scene.own[ids],
            metrics=("R@1", "mAP@R"),
        )
        return {"nearest": scores["r1"], "nearest:mAP@R": scores["map_r"]}


@dataclass(frozen=True, kw_only=True)
class MarginAttack(RecallGoal):
    """Ours: the most direct attack on the nearest neighbour (see `margin`); the same in both protocols."""

    kept: ClassVar[str | None] = "margin"

    @property
    def name(self) -> str:
        return "margin"

    def objective(self, scene: Scene, ids: Tensor, targets: Tensor | None) -> Objective:
        return margin(Gallery(scene.gallery, scene.gallery_labels), scene.labels[ids], scene.own[ids])


@dataclass(frozen=True)
class Gallery:
    """The clean embeddings that queries are compared with."""

    embeddings: Tensor  # (G, D) unit vectors
    labels: Tensor  # (G,)


def margin(gallery: Gallery, labels: Tensor, own: Tensor) -> Objective:
    """Climb min over matches d(q', x) − min over non-matches d(q', x); above 0 the nearest neighbour is wrong.

    `labels` (U,) are the queries' classes and `own` (U,) each query's own gallery id, which never counts.
    """

    def value(e: Tensor, positions: Tensor) -> Tensor:
        distances = distance_matrix(e[:, 0], gallery.embeddings)
        match, itself = _matches(gallery.labels, labels[positions], own[positions])
        nearest_match = distances.masked_fill(~match | itself, torch.inf).amin(1)
        nearest_other = distances.masked_fill(match | itself, torch.inf).amin(1)
        return (nearest_match - nearest_other).clamp(max=WIN_MARGIN)

    return Objective(value, top=WIN_MARGIN)


def _matches(gallery_labels: Tensor, labels: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """(N, G) which gallery items have the query's label, and which one is the query itself."""
    items = torch.arange(len(gallery_labels), device=gallery_labels.device)
    return labels[:, None] == gallery_labels, own[:, None] == items


def attacked_queries(problem: Problem, images: Tensor, ids: Tensor, batch: int = 256) -> Tensor:
    """Embeddings (Q, D) of the queries after the attack, in full precision; random starts are drawn by `ids`."""
    ascent = ascend(problem, images[:, None], ids=ids, batch=batch)
    return embed_all(problem.embed, ascent.images[:, 0].split(batch))


def first_is_right(queries: Tensor, gallery: Gallery, labels: Tensor, own: Tensor) -> Tensor:
    """(Q,) whether the nearest item has the query's label; `own` is each query's id in the gallery, or -1."""
    found = retrieve(queries, gallery.embeddings, 1, query_labels=labels, gallery_labels=gallery.labels, exclude=own)
    return found.relevant[:, 0]


def attack_recall(
    problem: Problem, images: Tensor, labels: Tensor, own: Tensor, gallery: Gallery, ids: Tensor, batch: int = 256
) -> Tensor:
    """Which queries (Q,) still have a right nearest neighbour after the attack, measured in full precision.

    `problem` climbs `margin(gallery, labels, own)`; `own` is each query's id in the gallery, or -1. Random
    starts are drawn by `ids`.
    """
    return first_is_right(attacked_queries(problem, images, ids, batch), gallery, labels, own)
