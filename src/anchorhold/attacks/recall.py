"""Attacks that want a wrong nearest neighbour."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..geometry import distance_matrix, retrieve
from ..model.frozen import precise
from ..perturb.ascend import Budget, Objective, ascend
from ..perturb.ball import Ball
from ..random import Key

__all__ = ["Gallery", "attack_recall", "margin"]

SLACK = 1e-4  # a win must survive fp32 noise between the ascent and the measurement


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
        match = labels[positions, None] == gallery.labels
        ids = torch.arange(len(gallery.labels), device=e.device)
        self_ = own[positions, None] == ids
        nearest_match = distances.masked_fill(~match | self_, torch.inf).amin(1)
        nearest_other = distances.masked_fill(match | self_, torch.inf).amin(1)
        return (nearest_match - nearest_other).clamp(max=SLACK)

    return Objective(value, lambda e, positions: value(e, positions) >= SLACK)


def attack_recall(
    embed: Callable[[Tensor], Tensor],
    images: Tensor,
    labels: Tensor,
    own: Tensor,
    gallery: Gallery,
    ball: Ball,
    budget: Budget,
    key: Key,
    batch: int = 256,
) -> Tensor:
    """Which queries (Q,) still have a right nearest neighbour after the attack, measured in full precision."""
    goal = margin(gallery, labels, own)
    ascent = ascend(embed, images[:, None], goal, ball, budget, key=key, ids=own, batch=batch)
    with torch.no_grad(), precise():
        attacked = torch.cat([embed(part) for part in ascent.images[:, 0].split(batch)])
    found = retrieve(attacked, gallery.embeddings, 1, query_labels=labels, gallery_labels=gallery.labels, exclude=own)
    return found.relevant[:, 0]
