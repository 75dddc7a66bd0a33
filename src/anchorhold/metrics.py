"""How well a model retrieves: R@k, mAP, mAP@R, mAP@10, NMI.

Definitions, since these names mean different things in different papers. Each query's list is the gallery by
Euclidean distance, nearest first, equal distances by gallery id, the query's own image left out by identity.

    R@k     at least one of the first k items has the query's label
    mAP     precision at every relevant item of the whole list, summed, over the number R of relevant items
    mAP@R   the same sum over the first R items only, over R (Musgrave et al. 2020)
    mAP@10  the same sum over the first 10 items, over 10 (what RobRank prints as "mAP@R")
    NMI     normalised mutual information of k-means clusters and labels

All are means over queries, as fractions 0..1. A query whose label is nowhere in the gallery is a miss in R@k
and mAP@10; it has no mAP and no mAP@R, is left out of those two means and counted in `unmatched`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import DataError
from .geometry import distance_rows
from .random import Key

__all__ = [
    "Metrics",
    "evaluate",
    "kmeans",
    "nmi",
    "normalised_mutual_information",
    "precision_sum",
    "score_queries",
]


_NOWHERE = 2**62  # where the nearest match of a query stands that has none


@dataclass(frozen=True)
class Metrics:
    """Clean retrieval scores, as fractions 0..1; see the head of this module for what each one means."""

    r1: float
    r2: float
    r4: float
    map: float
    map_r: float
    map_10: float
    nmi: float | None
    queries: int
    unmatched: int  # queries whose label is nowhere in the gallery

    def percent(self) -> dict[str, float]:
        """The scores by their usual names, in percent."""
        names = {"r1": "R@1", "r2": "R@2", "r4": "R@4", "map": "mAP", "map_r": "mAP@R", "map_10": "mAP@10"}
        scores = {printed: 100 * float(getattr(self, name)) for name, printed in names.items()}
        return scores if self.nmi is None else scores | {"NMI": 100 * self.nmi}


def precision_sum(query: Tensor, position: Tensor, hits: Tensor, depth: Tensor | int) -> Tensor:
    """(Q,) Σ over the relevant items i among the first `depth` of: precision of the first i items.

    Relevant items are given by whose they are and where they stand, (H,) each, query by query and nearest first; `hits`
    (Q,) is how many each query has, `depth` one number or one a query.

    >>> precision_sum(torch.tensor([0, 0]), torch.tensor([0, 2]), torch.tensor([2]), 3)
    tensor([1.6667], dtype=torch.float64)
    """
    before = hits.cumsum(0) - hits  # hits of all earlier queries
    nth = torch.arange(1, len(query) + 1, device=query.device) - before[query]
    reached = position < (depth[query] if isinstance(depth, Tensor) else depth)
    precision = nth.double() / (position + 1) * reached
    return precision.new_zeros(len(hits)).index_add_(0, query, precision)


@torch.no_grad()
def score_queries(
    embeddings: Tensor,
    labels: Tensor,
    *,
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    self_ids: Tensor | None = None,
    chunk: int = 1024,
) -> dict[str, Tensor]:
    """Every per-query score of `Metrics` as a (Q,) float64 column; arguments as in `evaluate`."""
    if (gallery is None) != (gallery_labels is None):
        raise DataError("a gallery needs labels and labels a gallery; give both, or neither")
    if gallery is None or gallery_labels is None:
        gallery, gallery_labels = embeddings, labels
        self_ids = torch.arange(len(embeddings)) if self_ids is None else self_ids
    if len(embeddings) != len(labels) or len(gallery) != len(gallery_labels):
        raise DataError("there must be one label for each embedding, in query and gallery")
    if not len(embeddings):
        raise DataError("there are no queries to score; give at least one embedding")
    labels, gallery_labels = labels.to(gallery.device), gallery_labels.to(gallery.device)
    names = ("r1", "r2", "r4", "map", "map_r", "map_10")
    # Made beforehand: small results kept between large temporaries pin the heap, which then grows with every chunk.
    columns = torch.empty(len(names), len(embeddings), dtype=torch.float64, device=gallery.device)
    for rows, distances in distance_rows(embeddings, gallery, exclude=self_ids, chunk=chunk):
        match = labels[rows, None] == gallery_labels
        match &= distances < torch.inf  # not the query's own image
        hits = match.sum(1)
        query, position = _positions(distances, match, hits)
        nearest = torch.full_like(hits, _NOWHERE).scatter_reduce_(0, query, position, "amin")
        for row, k in enumerate((1, 2, 4)):
            columns[row, rows] = (nearest < k).double()
        columns[3, rows] = precision_sum(query, position, hits, len(gallery)) / hits
        columns[4, rows] = precision_sum(query, position, hits, hits) / hits
        columns[5, rows] = precision_sum(query, position, hits, 10) / 10
    return dict(zip(names, columns))


def _positions(distances: Tensor, match: Tensor, hits: Tensor) -> tuple[Tensor, Tensor]:
    """(H,) the query of each match and its place in that query's list, query by query and nearest first.

    Matches are few, so distances are sorted without their ids, and each match finds its place among them. Only lists in
    which a match and another item are equally far are put in order whole.
    """
    query, item = match.nonzero(as_tuple=True)
    nth = torch.arange(len(query), device=query.device) - (hits.cumsum(0) - hits)[query]
    place = torch.arange(int(hits.max()), device=query.device)
    real = place < hits.unsqueeze(1)
    reach = distances.new_full(real.shape, torch.inf)
    reach[query, nth] = distances[query, item]
    reach = reach.sort(1).values
    ordered = _sorted(distances)
    nearer, equal = (torch.searchsorted(own, reach) for own in (ordered, reach))
    at = nearer + place - equal  # matches that are equally far follow each other
    together = torch.searchsorted(ordered, reach, right=True) - nearer
    alike = torch.searchsorted(reach, reach, right=True) - equal
    mixed = (real & (together != alike)).any(1) | ordered[:, -1].isnan()  # NaN is in no order
    if mixed.any():
        lists = match[mixed].gather(1, distances[mixed].argsort(stable=True))
        at[mixed.unsqueeze(1) & real] = lists.nonzero(as_tuple=True)[1]
    return query, at[real]


def _sorted(distances: Tensor) -> Tensor:
    """Each row in order; on a CPU by numpy, which is several times faster."""
    if distances.is_cuda:
        return distances.sort(1).values
    ordered = distances.clone()
    ordered.numpy().sort(1)
    return ordered


def evaluate(
    embeddings: Tensor,
    labels: Tensor,
    *,
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    self_ids: Tensor | None = None,
    nmi: bool = False,
    key: Key | None = None,
    chunk: int = 1024,
) -> Metrics:
    """Clean scores of these embeddings as queries against a gallery, by default each against all others.

    `self_ids` (Q,) is the gallery id of each query's own image, or -1. NMI clusters the queries, from the
    same start at every call unless a `key` is given.

    >>> e = torch.tensor([[0.0], [0.1], [5.0], [5.1]])
    >>> evaluate(e, torch.tensor([0, 0, 1, 1])).r1
    1.0
    """
    columns = score_queries(
        embeddings, labels, gallery=gallery, gallery_labels=gallery_labels, self_ids=self_ids, chunk=chunk
    )
    means = {name: float(column.nanmean()) for name, column in columns.items()}
    clusters = _cluster(embeddings, labels, key or Key.of(0)("nmi")) if nmi else None
    return Metrics(**means, nmi=clusters, queries=len(labels), unmatched=int(columns["map"].isnan().sum()))


def nmi(embeddings: Tensor, labels: Tensor, key: Key) -> float:
    """NMI of the labels and as many k-means clusters as there are labels, 25 iterations."""
    return _cluster(embeddings, labels, key)


def _cluster(embeddings: Tensor, labels: Tensor, key: Key) -> float:
    return normalised_mutual_information(kmeans(embeddings, len(_renumber(labels)[1]), key), labels)


@torch.no_grad()
def kmeans(points: Tensor, k: int, key: Key, iterations: int = 25, chunk: int = 4096) -> Tensor:
    """The cluster (N,) of each point after Lloyd's iterations from k random points, on the points' device."""
    if not 1 <= k <= len(points):
        raise DataError(f"cannot make {k} clusters of {len(points)} points; choose k from 1 to {len(points)}")
    centres = points[key.permutation(len(points), points.device)[:k]]
    clusters, gaps = _assign(points, centres, chunk)
    for _ in range(iterations):
        sizes = clusters.bincount(minlength=k)
        # In float64, so that the order of addition, which CUDA does not fix, is lost in the rounding.
        sums = torch.zeros(k, points.shape[1], dtype=torch.float64, device=points.device)
        for rows, part in zip(clusters.split(chunk), points.split(chunk)):
            sums.index_add_(0, rows, part.double())
        centres = (sums / sizes.clamp(min=1).unsqueeze(1)).to(centres.dtype)
        empty = (sizes == 0).nonzero().squeeze(1)
        centres[empty] = points[gaps.topk(len(empty)).indices]  # start anew where the fit is worst
        before, (clusters, gaps) = clusters, _assign(points, centres, chunk)
        if torch.equal(before, clusters):
            break
    return clusters


def _assign(points: Tensor, centres: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """The nearest centre of each point, and how far it is."""
    found = [distances.min(1) for _, distances in distance_rows(points, centres, chunk=chunk)]
    return torch.cat([part.indices for part in found]), torch.cat([part.values for part in found])


def normalised_mutual_information(a: Tensor, b: Tensor) -> float:
    """Mutual information of two labellings over the mean of their entropies: 2 I(a; b) / (H(a) + H(b)).

    >>> normalised_mutual_information(torch.tensor([0, 0, 1, 1]), torch.tensor([7, 7, 3, 3]))
    1.0
    """
    a, in_a = _renumber(a)
    b, in_b = _renumber(b.to(a.device))
    _, in_both = _renumber(a * len(in_b) + b)  # the filled cells only: all k² of them may not fit
    entropies = _entropy(in_a) + _entropy(in_b)
    if entropies == 0:
        return 1.0  # one cluster, one label
    # I(a; b) = H(a) + H(b) - H(a, b); rounding may leave it a hair outside its bounds.
    return min(max(2 * (1 - _entropy(in_both) / entropies), 0.0), 1.0)


def _renumber(labels: Tensor) -> tuple[Tensor, Tensor]:
    """The labels as 0, 1, 2, …, and how often each occurs."""
    _, numbers, counts = torch.unique(labels, return_inverse=True, return_counts=True)
    return numbers, counts


def _entropy(counts: Tensor) -> float:
    share = counts.double() / counts.sum()
    return math.fsum((-share * share.log()).tolist())
