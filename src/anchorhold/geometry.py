"""Distances, ranks and nearest neighbours: all comparisons of two embeddings.

Three promises hold throughout. No gradient is ever NaN, not even between a point and itself. Everything is
computed in fp32 (or float64 when given float64), also inside autocast and where TF32 is allowed: a small
distance is the difference of two large numbers and does not survive fewer digits. And a query's own image is
excluded by its id, never because it is the nearest.

Embeddings are compared without normalisation; `unit` puts them on the sphere. Functions that rank a gallery process
queries in chunks, so the whole query × gallery matrix never exists.
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
    "nearest_rows",
    "ranks",
    "retrieve",
    "unit",
]

Distance = Callable[[Tensor, Tensor], Tensor]  # (..., D), (..., D) -> (...)

_MOST = 2**25  # distances that exist at a time, at most: 128 MiB
_LARGE = 2**11  # the size from which a CPU searches a gallery in tiles
_LINES, _WIDTH = 8, 768  # of a tile, at most: the distances of 1,024 queries to it fit in the cache
_EPS = 1e-6  # torch's own constant in F.pairwise_distance, hence part of every published number


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
    it. It also gives two equal points a definite gradient.

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
    """Iterate over the Q × G distances, at most `chunk` queries at a time: (slice of queries, their distances).

    A large gallery gets smaller chunks, so that memory does not grow with it. All chunks share one buffer: use or copy
    the distances before you request the next chunk.
    `exclude` (Q,) is the gallery id of each query's own image, or -1; its distance is put at infinity.
    """
    exclude = _checked(query, gallery, exclude)
    chunk = max(1, min(chunk, _MOST // max(len(gallery), 1)))
    query, gallery = _wide(query), _wide(gallery)
    lengths = _squares(gallery)
    # Allocated once: on a CPU, fresh memory of this size takes longer to map than to fill.
    room = gallery.new_empty(min(chunk, len(query)) * len(gallery))
    for start in range(0, len(query), chunk):
        rows = slice(start, min(start + chunk, len(query)))
        distances = _fill(room, query[rows], gallery, lengths)
        if exclude is not None:
            _hide(distances, exclude[rows])
        yield rows, distances


@torch.no_grad()
def nearest_rows(
    query: Tensor, gallery: Tensor, k: int, *, exclude: Tensor | None = None, chunk: int = 1024
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Iterate over the queries: (slice of queries, distances of their k nearest, their ids), ties by gallery id.

    `exclude` is as in `distance_rows`. On a CPU a large gallery is processed in tiles, and only candidates for the k
    nearest are kept. Writing all distances and selecting among them would take as long as computing them.
    """
    exclude = _checked(query, gallery, exclude)
    query, gallery = _wide(query), _wide(gallery)
    tiles = -(-len(gallery) // (_LINES * _WIDTH))
    width = 8 * -(-len(gallery) // (8 * _LINES * max(tiles, 1)))  # about equal tiles, in whole cache lines
    most = (tiles.bit_length() + 1) * (2 * k + 16)  # about k are expected of the first tile, and of each doubling
    if gallery.device.type != "cpu" or len(gallery) < _LARGE or k > width or 4 * most > len(gallery):
        for rows, distances in distance_rows(query, gallery, exclude=exclude, chunk=chunk):
            yield rows, *_smallest(distances, k)
        return
    lengths, room = _squares(gallery), gallery.new_empty(min(chunk, len(query)), _LINES * width)
    for start in range(0, len(query), chunk):
        rows = slice(start, min(start + chunk, len(query)))
        own = None if exclude is None else exclude[rows]
        values, ids, crowded = _within_reach(query[rows], gallery, lengths, k, own, most, room)
        values, ids = _smallest(values, k, ids)
        for some in crowded.nonzero().squeeze(1).split(chunk):
            hidden = None if own is None else own[some]
            for part, distances in distance_rows(query[rows][some], gallery, exclude=hidden, chunk=chunk):
                values[some[part]], ids[some[part]] = _smallest(distances, k)
        yield rows, values, ids


def _within_reach(
    x: Tensor, y: Tensor, lengths: Tensor, k: int, own: Tensor | None, most: int, room: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(Q, H) the distances of all items that may be among the k nearest, infinity behind them; (Q, H) their ids; and
    (Q,) which queries have more than `most` of them; their results are incomplete.

    A tile of the gallery is stored in lines in `room`. k columns of the first tile have an item within `reach`, so no
    item beyond it is among the k nearest. Later `reach` shrinks to the k-th item found. Columns whose minimum is beyond
    `reach` are skipped. Numbers are |y|² − 2xy until the end. Adding |x|² and taking the root keeps the order but may
    make two numbers equal, so `reach` has a tolerance.
    """
    count, base, tile = len(x), x.square().sum(-1, keepdim=True), room.shape[1]
    room, lines = room[:count], tile // _LINES * torch.arange(_LINES)
    # One extra column, for items that do not fit.
    values, ids = x.new_full((count, most + 1), torch.inf), torch.zeros(count, most + 1, dtype=torch.long)
    kept, reach, held = torch.zeros(count, dtype=torch.long), base, k

    def drawn_in(numbers: Tensor) -> Tensor:
        last = numbers.topk(k, largest=False, sorted=False).values.amax(1, keepdim=True)
        return last + 16 * torch.finfo(x.dtype).eps * (last.abs() + base)

    for turn, first in enumerate(range(0, len(y), tile)):
        items = slice(first, min(first + tile, len(y)))
        with _no_autocast(x):
            torch.addmm(lengths[items], x, y[items].mT, alpha=-2, out=room[:, : items.stop - first])
        room[:, items.stop - first :] = torch.inf
        if own is not None:
            _hide(room, own - first)
        least = room.unflatten(1, (_LINES, -1)).amin(1)
        if turn == 0:
            # Fold several columns into one while k is small: topk is expensive.
            fold = next(fold for fold in (8, 4, 2, 1) if least.shape[1] >= 3 * k * fold or fold == 1)
            reach = drawn_in(least.unflatten(1, (fold, -1)).amin(1))
        row, column = (~(least > reach)).nonzero(as_tuple=True)  # NaN counts as within reach and is sorted last
        kept[kept + row.bincount(minlength=count) > most] = most + 1
        if int(kept.max()) > most:  # these queries are computed separately, and would take much memory here
            some = (kept <= most)[row]
            row, column = row[some], column[some]
        place = (row * tile + column).unsqueeze(1) + lines
        number = room.take(place)
        hit = (~(number > reach[row])).flatten().nonzero().squeeze(1)
        row, place, number = row[hit // _LINES], place.flatten()[hit], number.flatten()[hit]
        found = row.bincount(minlength=count)
        nth = torch.arange(len(row)) + (kept - found.cumsum(0) + found)[row]
        free = row * (most + 1) + nth.clamp_(max=most)
        values.put_(free, number)
        ids.put_(free, place - row * tile + first)
        kept += found
        held = max(min(int(kept.max()), most), k)
        if turn & (turn + 1) == 0 and items.stop < len(y):  # after 1, 2, 4, 8, … tiles
            reach = drawn_in(values[:, :held])
    return values[:, :held].add_(base).clamp_(min=0).sqrt_(), ids[:, :held], kept > most


def _checked(query: Tensor, gallery: Tensor, exclude: Tensor | None) -> Tensor | None:
    """Check the shapes; returns `exclude` on the gallery's device."""
    if query.ndim != 2 or gallery.ndim != 2 or query.shape[1] != gallery.shape[1]:
        raise DataError(
            f"query {tuple(query.shape)} and gallery {tuple(gallery.shape)} do not fit together; "
            "give (number, dimension) for both, from the same model"
        )
    if exclude is None:
        return None
    return _ids(exclude, "exclude", len(query), len(gallery), lowest=-1, device=gallery.device)


def _squares(gallery: Tensor) -> Tensor:
    """(G,) |y|², in parts that fit in the cache: squaring all of it at once is slower and doubles the memory."""
    room = gallery.new_empty(2**8, gallery.shape[1])
    parts = gallery.split(len(room))
    return torch.cat([torch.mul(part, part, out=room[: len(part)]).sum(-1) for part in parts])


def _fill(room: Tensor, x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
    """`distance_matrix` without gradient, in existing memory."""
    distances = room[: len(x) * len(y)].view(len(x), len(y))
    with _no_autocast(x), _no_tf32(x):
        torch.addmm(lengths, x, y.mT, alpha=-2, out=distances)
    return distances.add_(x.square().sum(-1, keepdim=True)).clamp_(min=0).sqrt_()


def _check_finite(query: Tensor, gallery: Tensor) -> None:
    """Refuse NaN and infinity, which have no order."""
    for name, side in (("query", query), ("gallery", gallery)):
        # Minimum and maximum suffice: a mask of a large gallery takes more memory than the gallery.
        if side.numel() and not all(end.isfinite() for end in side.aminmax()):
            raise DataError(f"embeddings are not finite: {name} has NaN or infinity; check the model")


def _hide(distances: Tensor, own: Tensor) -> None:
    """Set the distance of each query's own item to infinity, where it is among these."""
    known = ((own >= 0) & (own < distances.shape[1])).nonzero().squeeze(1)
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
    for rows, near, who in nearest_rows(query, gallery, k, exclude=exclude, chunk=chunk):
        found[rows], ids[rows] = near, who
    relevant = torch.zeros(shape, dtype=torch.bool, device=device)
    if query_labels is not None and gallery_labels is not None:
        relevant = gallery_labels.to(device)[ids] == query_labels.to(device).unsqueeze(1)
    return Retrieved(ids, found, relevant)


def _smallest(distances: Tensor, k: int, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k smallest of each row and their ids (without `ids`: their columns), ties in order of id.

    topk does not define ties, and a stable sort of every row is far slower. So topk selects, its selection is sorted,
    and only rows with ties across the cut are sorted in full.
    """
    values, chosen = distances.topk(k, largest=False, sorted=False)
    values, chosen = _in_order(values, chosen if ids is None else ids.gather(1, chosen))
    cut_through = (distances <= values[:, -1:]).sum(1) > k
    if cut_through.any():
        rows = distances[cut_through]
        names = torch.arange(rows.shape[1], device=rows.device).expand_as(rows) if ids is None else ids[cut_through]
        chosen[cut_through] = _in_order(rows, names)[1][:, :k]
    return values, chosen


def _in_order(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Values and ids, sorted by value and then by id."""
    ids, by_id = ids.sort()
    values, by_value = values.gather(1, by_id).sort(stable=True)
    return values, ids.gather(1, by_value)


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
        # Read before the own image is set to infinity: a target may be the query's own image.
        reach = distances.gather(1, wanted[rows])
        if exclude is not None:
            _hide(distances, exclude[rows])
        for column in range(wanted.shape[1]):
            result[rows, column] = (distances < reach[:, column, None]).sum(1)
    return result.reshape(targets.shape)
