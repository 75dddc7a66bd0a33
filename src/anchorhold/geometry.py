"""Distances, ranks and nearest neighbours: the one place where two embeddings are compared.

Three promises hold throughout. No gradient is ever NaN, not even between a point and itself. Everything is
computed in fp32 (or float64 when given float64), also inside autocast and where TF32 is allowed: a small
distance is the difference of two large numbers and does not survive fewer digits. And a query's own image is
left out because of *who* it is, never because it happens to come first.

Embeddings are compared as they come; `unit` puts them on the sphere. Whatever ranks a gallery walks through
it in chunks of queries, so the whole query × gallery matrix never exists.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import DataError

__all__ = [
    "Distance",
    "Retrieved",
    "cosine",
    "distance_matrix",
    "distance_rows",
    "euclidean",
    "ranks",
    "retrieve",
    "unit",
]

Distance = Callable[[Tensor, Tensor], Tensor]  # (..., D), (..., D) -> (...)

_MOST = 2**25  # distances that exist at a time, at most: 128 MiB
_EPS = 1e-6  # torch's own constant in F.pairwise_distance, hence part of every printed number


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _no_autocast(x: Tensor) -> AbstractContextManager[None]:
    return torch.autocast(x.device.type, enabled=False)


@contextmanager
def _no_tf32(x: Tensor) -> Iterator[None]:
    if not x.is_cuda or torch.compiler.is_compiling():
        yield
        return
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def unit(x: Tensor) -> Tensor:
    """Each row on the unit sphere, x / |x|; a row of zeros stays zero.

    >>> unit(torch.tensor([[3.0, 4.0]]))
    tensor([[0.6000, 0.8000]])
    """
    with _no_autocast(x):
        return F.normalize(_wide(x), dim=-1)


def euclidean(x: Tensor, y: Tensor) -> Tensor:
    """Row-wise Euclidean distance |x - y + 1e-6|, (..., D) and (..., D) to (...).

    The 1e-6 is what torch adds in `F.pairwise_distance`. It is kept because every published number contains
    it; it also gives two equal points a definite direction in which to part.

    >>> euclidean(torch.zeros(2, 4), torch.ones(4))
    tensor([2.0000, 2.0000])
    """
    with _no_autocast(x):
        distance: Tensor = torch.linalg.vector_norm(_wide(x) - _wide(y) + _EPS, dim=-1)
        return distance


def cosine(x: Tensor, y: Tensor) -> Tensor:
    """Row-wise cosine distance 1 - cos(x, y), (..., D) and (..., D) to (...).

    >>> cosine(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([1.0, 0.0]))
    tensor([0., 1.])
    """
    with _no_autocast(x):
        similarity: Tensor = F.cosine_similarity(_wide(x), _wide(y), dim=-1)
        return 1 - similarity


def distance_matrix(x: Tensor, y: Tensor, *, lengths: Tensor | None = None) -> Tensor:
    """All Euclidean distances, (Q, D) and (G, D) to (Q, G): sqrt(max(0, |x|² + |y|² - 2xy)).

    Where a distance is zero its gradient is zero. When both arguments are the same tensor the diagonal is
    exactly zero; rows that are merely equal may differ by rounding, about 1e-3 at fp32 and D = 512.
    `lengths` (G,) are |y|² where they are known already.

    >>> distance_matrix(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[5., 0.]])
    """
    itself = x is y
    with _no_autocast(x), _no_tf32(x):
        x, y = _wide(x), _wide(y)
        lengths = y.square().sum(-1) if lengths is None else lengths
        squared = torch.addmm(lengths, x, y.mT, alpha=-2).add_(x.square().sum(-1, keepdim=True))
        if itself:
            squared = squared.masked_fill(torch.eye(len(x), dtype=torch.bool, device=x.device), 0)
        if not squared.requires_grad:
            return squared.clamp_(min=0).sqrt_()  # in place: galleries are large
        # sqrt has an infinite slope at zero, and infinity times zero is NaN: the root of 1 stands in there.
        zero = squared <= 0
        return squared.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


@torch.no_grad()
def distance_rows(
    query: Tensor, gallery: Tensor, *, exclude: Tensor | None = None, chunk: int = 1024
) -> Iterator[tuple[slice, Tensor]]:
    """Walk through the Q × G distances, at most `chunk` queries at a time: (which queries, their distances).

    Before a large gallery fewer queries go at a time, so that memory does not grow with it.
    `exclude` (Q,) is the gallery id of each query's own image, or -1; its distance is put at infinity.
    """
    if query.ndim != 2 or gallery.ndim != 2 or query.shape[1] != gallery.shape[1]:
        raise DataError(
            f"query {tuple(query.shape)} and gallery {tuple(gallery.shape)} do not fit together; "
            "give (number, dimension) for both, from the same model"
        )
    if exclude is not None:
        exclude = _ids(exclude, "exclude", len(query), len(gallery), lowest=-1, device=gallery.device)
    chunk = max(1, min(chunk, _MOST // max(len(gallery), 1)))
    gallery = _wide(gallery)
    # Once and in parts: a square of the whole gallery is another gallery.
    lengths = torch.cat([part.square().sum(-1) for part in gallery.split(2**14)]) if len(gallery) else None
    for start in range(0, len(query), chunk):
        rows = slice(start, min(start + chunk, len(query)))
        distances = distance_matrix(query[rows], gallery, lengths=lengths)
        if exclude is not None:
            _hide(distances, exclude[rows])
        yield rows, distances


def _check_finite(query: Tensor, gallery: Tensor) -> None:
    """NaN is neither near nor far, so nothing that holds it has an order."""
    for name, side in (("query", query), ("gallery", gallery)):
        # By the ends alone: a mask of a large gallery, and what torch makes on the way to it, are larger than itself.
        if side.numel() and not all(end.isfinite() for end in side.aminmax()):
            raise DataError(f"embeddings are not finite: {name} has NaN or infinity; look at the model they come from")


def _hide(distances: Tensor, own: Tensor) -> None:
    known = (own >= 0).nonzero().squeeze(1)
    distances[known, own[known]] = torch.inf


def _ids(ids: Tensor, name: str, count: int, high: int, *, lowest: int, device: torch.device) -> Tensor:
    if ids.ndim == 0 or len(ids) != count:
        raise DataError(f"{name} has shape {tuple(ids.shape)}; give one row for each of the {count} queries")
    if ids.numel() and not (lowest <= int(ids.min()) and int(ids.max()) < high):
        raise DataError(f"{name} must hold positions in the gallery, {lowest}..{high - 1}")
    return ids.long().to(device)


@dataclass(frozen=True)
class Retrieved:
    """The k nearest gallery items of each query, nearest first.

    `ids` and `distances` are (Q, k); `relevant` (Q, k) says which share the query's label, and is all False
    when no labels were given.
    """

    ids: Tensor
    distances: Tensor
    relevant: Tensor


@torch.no_grad()
def retrieve(
    query: Tensor,
    gallery: Tensor,
    k: int,
    *,
    query_labels: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    exclude: Tensor | None = None,
    chunk: int = 1024,
) -> Retrieved:
    """The exact k nearest gallery items by Euclidean distance; equal distances in order of gallery id.

    `exclude` (Q,) is the gallery id of each query's own image, or -1 where it is not in the gallery.

    >>> line = torch.tensor([[0.0], [1.0], [3.0]])
    >>> retrieve(line, line, 1, exclude=torch.arange(3)).ids.squeeze(1)
    tensor([1, 0, 1])
    """
    if (query_labels is None) != (gallery_labels is None):
        raise DataError("labels for one side only; give query_labels and gallery_labels, or neither")
    available = len(gallery) - int(exclude is not None and bool((exclude >= 0).any()))
    if not 1 <= k <= available:
        raise DataError(f"cannot retrieve {k} of {available} gallery items; choose k from 1 to {available}")
    _check_finite(query, gallery)
    shape, device = (len(query), k), gallery.device
    ids = torch.empty(shape, dtype=torch.long, device=device)
    found = torch.empty(shape, dtype=_wide(query[:0]).dtype, device=device)
    for rows, distances in distance_rows(query, gallery, exclude=exclude, chunk=chunk):
        found[rows], ids[rows] = _smallest(distances, k)
    relevant = torch.zeros(shape, dtype=torch.bool, device=device)
    if query_labels is not None and gallery_labels is not None:
        relevant = gallery_labels.to(device)[ids] == query_labels.to(device).unsqueeze(1)
    return Retrieved(ids, found, relevant)


def _smallest(distances: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k smallest of each row and where they are, ties in order of column.

    topk promises nothing about ties, and a stable sort of every row is far dearer. So topk chooses, its
    choice is put in order, and only rows where equals lie on both sides of the cut are sorted in full.
    """
    values, ids = distances.topk(k, largest=False)
    ids, by_id = ids.sort()
    values, by_value = values.gather(1, by_id).sort(stable=True)
    ids = ids.gather(1, by_value)
    cut_through = (distances <= values[:, -1:]).sum(1) > k
    if cut_through.any():
        ids[cut_through] = distances[cut_through].argsort(stable=True)[:, :k]
    return values, ids


@torch.no_grad()
def ranks(
    query: Tensor, gallery: Tensor, targets: Tensor, *, exclude: Tensor | None = None, chunk: int = 1024
) -> Tensor:
    """The exact 0-based rank of gallery item `targets[q]` for each query: how many items are strictly nearer.

    `targets` is (Q,) or (Q, T), and so is the answer. The item in `exclude` is not counted.

    >>> line = torch.tensor([[0.0], [1.0], [3.0]])
    >>> ranks(line[:1], line, torch.tensor([[1, 2]]), exclude=torch.tensor([0]))
    tensor([[0, 1]])
    """
    _check_finite(query, gallery)
    targets = _ids(targets, "targets", len(query), len(gallery), lowest=0, device=gallery.device)
    wanted = targets.reshape(len(query), -1)
    if exclude is not None:
        exclude = _ids(exclude, "exclude", len(query), len(gallery), lowest=-1, device=gallery.device)
    result = torch.empty_like(wanted)
    for rows, distances in distance_rows(query, gallery, chunk=chunk):
        # Looked up before self is put at infinity: a target may be the query's own image.
        reach = distances.gather(1, wanted[rows])
        if exclude is not None:
            _hide(distances, exclude[rows])
        for column in range(wanted.shape[1]):
            result[rows, column] = (distances < reach[:, column, None]).sum(1)
    return result.reshape(targets.shape)
