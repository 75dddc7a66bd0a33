"""How well a model retrieves: R@k, mAP, mAP@R, mAP@10, NMI.

Definitions, since these names mean different things in different papers. Each query's list is the gallery by
Euclidean distance, nearest first, equal distances by gallery id, the query's own image left out by identity.

    R@k     at least one of the first k items has the query's label
    mAP     precision at every relevant item of the whole list, summed, over the number R of relevant items
    mAP@R   the same sum over the first R items only, over R (Musgrave et al. 2020)
    mAP@10  the same sum over the first 10 items, over 10 (RobRank's "mAP@R")
    NMI     normalised mutual information of k-means clusters and labels

You may choose some of them. Lists are then ranked only as deep as needed: for mAP@R to R, the size of the largest
class. Only mAP needs the whole list.

All are means over queries, as fractions 0..1. A query whose label is not in the gallery is a miss in R@k
and mAP@10. It has no mAP and no mAP@R, is left out of those two means, and is counted in `unmatched`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import DataError, check, nearest
from .geometry import distance_rows, nearest_rows
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


NAMES = {"r1": "R@1", "r2": "R@2", "r4": "R@4", "map": "mAP", "map_r": "mAP@R", "map_10": "mAP@10"}
RANKED = tuple(NAMES.values())

_FIRST = {"r1": 1, "r2": 2, "r4": 4}
_NOWHERE = 2**62  # position of the nearest match of a query without any


@dataclass(frozen=True)
class Metrics:
    """Clean retrieval scores, as fractions 0..1; the head of this module defines them.

    A score that was not requested is NaN, and not in `percent()`.
    """

    r1: float
    r2: float
    r4: float
    map: float
    map_r: float
    map_10: float
    nmi: float | None
    queries: int
    unmatched: int  # queries whose label is not in the gallery
    chosen: tuple[str, ...] = RANKED  # the requested scores, by their usual names

    def percent(self) -> dict[str, float]:
        """The scores by their usual names, in percent."""
        scores = {usual: 100 * float(getattr(self, name)) for name, usual in NAMES.items() if usual in self.chosen}
        return scores if self.nmi is None else scores | {"NMI": 100 * self.nmi}


def precision_sum(query: Tensor, position: Tensor, hits: Tensor, depth: Tensor | int) -> Tensor:
    """(Q,) Σ over the relevant items i among the first `depth` of: precision of the first i items.

    Relevant items are given by their query and their position, (H,) each, query by query and nearest first. `hits` (Q,)
    is their number per query. `depth` is one number, or one per query.

    >>> precision_sum(torch.tensor([0, 0]), torch.tensor([0, 2]), torch.tensor([2]), 3)
    tensor([1.6667], dtype=torch.float64)
    """
    before = hits.cumsum(0) - hits  # hits of all earlier queries
    nth = torch.arange(1, len(query) + 1, device=query.device) - before[query]
    reached = position < (depth[query] if isinstance(depth, Tensor) else depth)
    precision = nth.double() / (position + 1) * reached
    return precision.new_zeros(len(hits)).index_add_(0, query, precision)


@dataclass(frozen=True)
class _Sides:
    """Checked queries and gallery, on the gallery's device; `own` is `self_ids` of `evaluate`."""

    queries: Tensor
    labels: Tensor
    gallery: Tensor
    gallery_labels: Tensor
    own: Tensor | None

    @property
    def finite(self) -> bool:
        """Whether all embeddings are finite, so that lists have an order."""
        return all(bool(end.isfinite()) for side in (self.queries, self.gallery) for end in side.aminmax())

    def relevant(self, rows: slice = slice(None)) -> Tensor:
        """(Q,) R: how many gallery items have the query's label, its own image apart."""
        labels = self.labels[rows]
        known, counts = self.gallery_labels.unique(return_counts=True)
        at = torch.searchsorted(known, labels).clamp(max=len(known) - 1)
        total = torch.where(known[at] == labels, counts[at], 0)
        if self.own is None:
            return total
        own = self.own[rows].to(labels.device)
        return total - ((own >= 0) & (self.gallery_labels[own.clamp(min=0)] == labels)).long()


def _sides(
    queries: Tensor, labels: Tensor, gallery: Tensor | None, gallery_labels: Tensor | None, own: Tensor | None
) -> _Sides:
    if (gallery is None) != (gallery_labels is None):
        raise DataError("a gallery needs labels and labels a gallery; give both, or neither")
    if gallery is None or gallery_labels is None:
        gallery, gallery_labels = queries, labels
        own = torch.arange(len(queries)) if own is None else own
    if len(queries) != len(labels) or len(gallery) != len(gallery_labels):
        raise DataError("there must be one label for each embedding, in query and gallery")
    if not len(queries):
        raise DataError("there are no queries to score; give at least one embedding")
    if not len(gallery):
        raise DataError("the gallery is empty; give at least one embedding to search")
    return _Sides(queries, labels.to(gallery.device), gallery, gallery_labels.to(gallery.device), own)


@torch.no_grad()
def score_queries(
    embeddings: Tensor,
    labels: Tensor,
    *,
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    self_ids: Tensor | None = None,
    metrics: Sequence[str] = RANKED,
    chunk: int = 1024,
) -> dict[str, Tensor]:
    """Each chosen per-query score of `Metrics`, by its field, as a (Q,) float64 column; arguments as in `evaluate`."""
    _check_names(metrics, RANKED)
    sides = _sides(embeddings, labels, gallery, gallery_labels, self_ids)
    names = [name for name, usual in NAMES.items() if usual in metrics]
    # Allocated first: small results between large temporaries fragment the heap, which then grows with every chunk.
    columns = torch.empty(len(names), len(embeddings), dtype=torch.float64, device=sides.gallery.device)
    for rows, query, position, hits, total in _matches(sides, _depth(sides, names), chunk):
        first = torch.full_like(hits, _NOWHERE).scatter_reduce_(0, query, position, "amin")
        for column, name in zip(columns, names):
            if name in _FIRST:
                column[rows] = (first < _FIRST[name]).double()
            elif name == "map_10":
                column[rows] = precision_sum(query, position, hits, 10) / 10
            else:
                column[rows] = precision_sum(query, position, hits, total if name == "map_r" else _NOWHERE) / total
    return dict(zip(names, columns))


def _check_names(metrics: Sequence[str], known: Sequence[str]) -> None:
    check(not isinstance(metrics, str), f"metrics are a list of names, such as ({str(metrics)!r},)")
    for name in metrics:
        check(name in known, f"no metric {name!r}; {nearest(name, known)}")


def _depth(sides: _Sides, names: Sequence[str]) -> int:
    """How many items of each list the metrics need."""
    if not names:
        return 0
    largest = int(sides.gallery_labels.unique(return_counts=True)[1].max())
    needed = {**_FIRST, "map_10": 10, "map_r": largest, "map": len(sides.gallery)}
    return min(max(needed[name] for name in names), len(sides.gallery))


def _matches(sides: _Sides, depth: int, chunk: int) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor]]:
    """Iterate over the queries: (slice, query, position, hits, total), for the matches among the first `depth` items.

    `query` and `position` (H,) are each match's query and position, query by query and nearest first. `hits` (Q,) is
    their number per query, `total` (Q,) the number in the whole list.
    """
    if not depth:
        return
    labels = sides.labels
    if 4 * depth < len(sides.gallery) and sides.finite:
        total = None
        for rows, distances, ids in nearest_rows(sides.queries, sides.gallery, depth, exclude=sides.own, chunk=chunk):
            total = sides.relevant() if total is None else total
            match = (sides.gallery_labels[ids] == labels[rows, None]) & (distances < torch.inf)
            query, position = match.nonzero(as_tuple=True)
            yield rows, query, position, match.sum(1), total[rows]
        return
    for rows, distances in distance_rows(sides.queries, sides.gallery, exclude=sides.own, chunk=chunk):
        match = labels[rows, None] == sides.gallery_labels
        match &= distances < torch.inf  # not the query's own image
        hits = match.sum(1)
        yield rows, *_positions(distances, match, hits), hits, hits


def _positions(distances: Tensor, match: Tensor, hits: Tensor) -> tuple[Tensor, Tensor]:
    """(H,) the query of each match and its position in that query's list, query by query and nearest first.

    Matches are few, so distances are sorted without ids, and each match is located by binary search. Only lists with a
    tie between a match and another item are sorted in full.
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
    at = nearer + place - equal  # tied matches get consecutive positions
    together = torch.searchsorted(ordered, reach, right=True) - nearer
    alike = torch.searchsorted(reach, reach, right=True) - equal
    mixed = (real & (together != alike)).any(1) | ordered[:, -1].isnan()  # NaN has no order
    if mixed.any():
        lists = match[mixed].gather(1, distances[mixed].argsort(stable=True))
        at[mixed.unsqueeze(1) & real] = lists.nonzero(as_tuple=True)[1]
    return query, at[real]


def _sorted(distances: Tensor) -> Tensor:
    """Each row sorted; on a CPU by numpy, which is several times faster."""
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
    metrics: Sequence[str] = RANKED,
    key: Key | None = None,
    chunk: int = 1024,
) -> Metrics:
    """Clean scores of these embeddings as queries against a gallery, by default each against all others.

    Args:
        embeddings: (Q, D) queries, and their `labels` (Q,).
        gallery: (G, D) items to search, with `gallery_labels` (G,); the queries by default.
        self_ids: (Q,) the gallery id of each query's own image, or -1.
        metrics: some of R@1, R@2, R@4, mAP, mAP@R, mAP@10 and NMI. Without mAP no list is ranked in full.
        key: determines the start of the clusters of NMI; a fixed one by default.
        chunk: maximum number of queries at a time.

    >>> e = torch.tensor([[0.0], [0.1], [5.0], [5.1]])
    >>> evaluate(e, torch.tensor([0, 0, 1, 1]), metrics=["R@1", "mAP@R"]).percent()
    {'R@1': 100.0, 'mAP@R': 100.0}
    """
    _check_names(metrics, (*RANKED, "NMI"))
    chosen = tuple(name for name in RANKED if name in metrics)
    sides = _sides(embeddings, labels, gallery, gallery_labels, self_ids)
    columns = score_queries(
        embeddings,
        labels,
        gallery=gallery,
        gallery_labels=gallery_labels,
        self_ids=self_ids,
        metrics=chosen,
        chunk=chunk,
    )
    means = dict.fromkeys(NAMES, math.nan) | {name: float(column.nanmean()) for name, column in columns.items()}
    clusters = _cluster(embeddings, labels, key or Key.of(0)("nmi")) if "NMI" in metrics else None
    unmatched = int((sides.relevant() == 0).sum())
    return Metrics(**means, nmi=clusters, queries=len(labels), unmatched=unmatched, chosen=chosen)


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
        # In float64: CUDA does not fix the order of addition, and the difference is then below fp32 rounding.
        sums = torch.zeros(k, points.shape[1], dtype=torch.float64, device=points.device)
        for rows, part in zip(clusters.split(chunk), points.split(chunk)):
            sums.index_add_(0, rows, part.double())
        centres = (sums / sizes.clamp(min=1).unsqueeze(1)).to(centres.dtype)
        empty = (sizes == 0).nonzero().squeeze(1)
        centres[empty] = points[gaps.topk(len(empty)).indices]  # restart empty clusters where the fit is worst
        before, (clusters, gaps) = clusters, _assign(points, centres, chunk)
        if torch.equal(before, clusters):
            break
    return clusters


def _assign(points: Tensor, centres: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """The nearest centre of each point, and its distance."""
    found = [distances.min(1) for _, distances in distance_rows(points, centres, chunk=chunk)]
    return torch.cat([part.indices for part in found]), torch.cat([part.values for part in found])


def normalised_mutual_information(a: Tensor, b: Tensor) -> float:
    """Mutual information of two labellings over the mean of their entropies: 2 I(a; b) / (H(a) + H(b)).

    >>> normalised_mutual_information(torch.tensor([0, 0, 1, 1]), torch.tensor([7, 7, 3, 3]))
    1.0
    """
    a, in_a = _renumber(a)
    b, in_b = _renumber(b.to(a.device))
    _, in_both = _renumber(a * len(in_b) + b)  # non-empty cells only: all k² may not fit in memory
    entropies = _entropy(in_a) + _entropy(in_b)
    if entropies == 0:
        return 1.0  # one cluster, one label
    # I(a; b) = H(a) + H(b) - H(a, b); clamped, since rounding may exceed its bounds.
    return min(max(2 * (1 - _entropy(in_both) / entropies), 0.0), 1.0)


def _renumber(labels: Tensor) -> tuple[Tensor, Tensor]:
    """The labels as 0, 1, 2, …, and how often each occurs."""
    _, numbers, counts = torch.unique(labels, return_inverse=True, return_counts=True)
    return numbers, counts


def _entropy(counts: Tensor) -> float:
    share = counts.double() / counts.sum()
    return math.fsum((-share * share.log()).tolist())
