"""What an attack is: its targets, its objective, and its measures.

A `Goal` says nothing about how a perturbation is found: `run.attack` gives its objective to the ascent. A goal gets
a `Scene`, the clean embeddings on both sides of a retrieval. It names samples by their position on one side.

There are two protocols. `published` reproduces the papers' numbers, with the known defects of the evaluator that made
them. `corrected` does what the papers describe. A goal carries the name of its protocol as a label. Its own fields say
what the protocol means, and `menu.ATTACKS` sets them. Goals with equal `run` make the same perturbations: run one of
them, measure both.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..errors import DataError
from ..geometry import retrieve
from ..perturb.problem import Objective
from ..perturb.settings import Budget
from ..random import Key

__all__ = ["Goal", "ProtocolName", "Scene", "Side"]

ProtocolName = Literal["published", "corrected"]
Side = Literal["query", "gallery"]


@dataclass(frozen=True)
class Scene:
    """The clean embeddings that attacks use: unit vectors in fp32 or float64, all on one device.

    Goals on the query side perturb queries; those on the gallery side perturb gallery items (candidates).

    Attributes:
        gallery: (G, D) the embeddings that are searched.
        gallery_labels: (G,) their classes.
        queries: (Q, D) the embeddings of the queries.
        labels: (Q,) the classes of the queries.
        own: (Q,) the gallery id of each query's own image, or -1 where the gallery does not hold it.
    """

    gallery: Tensor
    gallery_labels: Tensor
    queries: Tensor
    labels: Tensor
    own: Tensor

    def __post_init__(self) -> None:
        if not len(self.gallery):
            raise DataError("the gallery is empty; give at least one image to retrieve")
        if self.gallery.ndim != 2 or self.queries.ndim != 2 or self.gallery.shape[1] != self.queries.shape[1]:
            raise DataError(
                f"gallery {tuple(self.gallery.shape)} and queries {tuple(self.queries.shape)} do not fit together; "
                "give (number, dimension) for both, from the same model"
            )
        if len(self.gallery) != len(self.gallery_labels) or not (
            len(self.queries) == len(self.labels) == len(self.own)
        ):
            raise DataError("a scene needs one label for each embedding, and one `own` for each query")

    @classmethod
    def of(cls, embeddings: Tensor, labels: Tensor) -> "Scene":
        """Every image is a query against all others: the usual benchmark.

        >>> scene = Scene.of(torch.eye(3), torch.tensor([0, 0, 1]))
        >>> scene.own
        tensor([0, 1, 2])
        """
        return cls(embeddings, labels, embeddings, labels, torch.arange(len(embeddings), device=embeddings.device))

    def clean(self, side: Side) -> Tensor:
        """The clean embeddings of the samples that can be attacked on this side."""
        return self.queries if side == "query" else self.gallery

    def query_of(self, ids: Tensor) -> Tensor:
        """Which query has gallery item `ids` as its own image, -1 where none has."""
        known = (self.own >= 0).nonzero().squeeze(1)
        whose = torch.full_like(self.gallery_labels, -1, dtype=torch.long)
        whose[self.own[known]] = known
        return whose[ids]


@dataclass(frozen=True, kw_only=True)
class Goal(ABC):
    """What an attacker wants of each sample. `ids` are the samples' positions on the goal's side."""

    protocol: ProtocolName = "corrected"

    side: ClassVar[Side] = "query"  # the side that is perturbed
    kept: ClassVar[str | None] = None  # the measure that is 1 where the attack failed; None for pure rank goals

    @property
    @abstractmethod
    def name(self) -> str:
        """As in the tables of the papers; also the name of the first measure."""

    @property
    def run(self) -> tuple[object, ...]:
        """What the perturbations depend on: goals with equal `run` differ in measurement only."""
        return (self.name,)

    @property
    def looks_back(self) -> bool:
        """Whether `measure` needs the embeddings from before the last step."""
        return False

    def prepare(self, budget: Budget) -> Budget:
        """The budget with which this goal can be climbed."""
        return budget

    def targets(self, scene: Scene, ids: Tensor, key: Key) -> Tensor | None:
        """The target of each sample, (N,) or (N, T), a function of key and id; -1: none, the sample stays clean."""
        return None

    @abstractmethod
    def objective(self, scene: Scene, ids: Tensor, targets: Tensor | None) -> Objective:
        """The objective to climb; its positions index `ids`. Constants are computed here, once."""

    @abstractmethod
    def measure(
        self, scene: Scene, ids: Tensor, targets: Tensor | None, embeddings: Tensor, early: Tensor | None = None
    ) -> dict[str, Tensor]:
        """One float64 number per sample and measure, from the embeddings (N, D) after the attack.

        `early` (N, D) are the embeddings from before the last step, for goals with `looks_back`.
        """

    def success(self, measures: dict[str, Tensor]) -> Tensor | None:
        """Which samples (N,) the attack beat; None where the goal cannot be reached or missed."""
        return None if self.kept is None else measures[self.kept] < 0.5


def aimed(targets: Tensor | None) -> Tensor:
    """The targets of a goal that needs them."""
    if targets is None:
        raise DataError("this goal aims at targets; draw them with goal.targets(scene, ids, key)")
    return targets


def own_ids(scene: Scene, ids: Tensor, by_position: bool) -> Tensor:
    """The gallery id of each query's own image: by identity, or, as published, the nearest to its clean embedding."""
    own = scene.own[ids]
    if not by_position or not len(ids):
        return own
    return torch.where(own >= 0, retrieve(scene.queries[ids], scene.gallery, 1).ids[:, 0], own)


def neighbours(query: Tensor, gallery: Tensor, wanted: int, own: Tensor) -> Tensor:
    """The `wanted` nearest (N, k) other than `own`, or fewer where the gallery is smaller."""
    others = len(gallery) - int(bool((own >= 0).any()))
    if not others:
        raise DataError("the gallery holds only the image itself; give a gallery of at least 2 images")
    return retrieve(query, gallery, min(wanted, others), exclude=own).ids
