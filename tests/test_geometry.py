"""Distances, nearest neighbours and ranks against plain loops, in every dtype and chunk size."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from anchorhold import geometry
from anchorhold.errors import DataError
from anchorhold.random import Key
from tests import reference


def points(rows: int, columns: int = 6, purpose: str = "points", dtype: torch.dtype = torch.float64) -> Tensor:
    return Key.of(0)(purpose).normal(torch.arange(rows), (columns,), dtype)


def grid(rows: int) -> Tensor:
    """Points on a coarse grid: exact distances, many of them equal."""
    return (points(rows, 2) * 1.5).round()


# Row-wise distances


def test_unit_rows_have_length_one_and_zero_stays() -> None:
    assert torch.allclose(geometry.unit(points(5)).norm(dim=1), torch.ones(5, dtype=torch.float64))
    assert (geometry.unit(torch.zeros(1, 3)) == 0).all()


def test_row_wise_distances_match_torch_and_loops() -> None:
    x, y = points(7), points(7, purpose="others")
    assert torch.allclose(geometry.euclidean(x, y), F.pairwise_distance(x, y), atol=0, rtol=1e-14)
    slow = torch.tensor([reference.distance(a, b, 1e-6) for a, b in zip(x.tolist(), y.tolist())])
    assert torch.allclose(geometry.euclidean(x, y), slow.double(), atol=1e-6)
    slow = torch.tensor([reference.cosine(a, b) for a, b in zip(x.tolist(), y.tolist())])
    assert torch.allclose(geometry.cosine(x, y), slow.double(), atol=1e-6)


def test_leading_dimensions_broadcast() -> None:
    x, y = points(6).reshape(2, 3, 6), points(3, purpose="others")
    for distance in (geometry.euclidean, geometry.cosine):
        assert distance(x, y).shape == (2, 3)
        assert torch.allclose(distance(x, y)[1], distance(x[1], y))


def test_matrix_agrees_with_rows() -> None:
    x, y = points(5), points(8, purpose="others")
    slow = torch.tensor([[reference.distance(a, b) for b in y.tolist()] for a in x.tolist()])
    assert torch.allclose(geometry.distance_matrix(x, y), slow.double(), atol=1e-6)


def test_matrix_of_a_tensor_with_itself_has_a_zero_diagonal() -> None:
    x = geometry.unit(points(64, 512, dtype=torch.float32))
    assert (geometry.distance_matrix(x, x).diagonal() == 0).all()
    noisy = geometry.distance_matrix(x, x.clone())
    assert noisy.isfinite().all()
    assert (noisy.diagonal() < 2e-3).all()


# Gradients


@pytest.mark.parametrize("distance", [geometry.euclidean, geometry.cosine, geometry.distance_matrix])
def test_gradients_are_right(distance: geometry.Distance) -> None:
    x, y = points(3, 4).requires_grad_(), points(3, 4, "others").requires_grad_()
    assert torch.autograd.gradcheck(distance, (x, y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "distance", [geometry.euclidean, geometry.cosine, geometry.distance_matrix], ids=lambda f: f.__name__
)
def test_gradients_are_finite_at_zero_distance(distance: geometry.Distance, dtype: torch.dtype) -> None:
    for start in (points(3, 4, dtype=dtype), torch.zeros(3, 4, dtype=dtype)):
        x, y = start.clone().requires_grad_(), start.clone()
        (gradient,) = torch.autograd.grad(distance(x, y).sum(), x)
        assert gradient.isfinite().all()


def test_the_matrix_gradient_is_zero_where_the_distance_is() -> None:
    x = torch.tensor([[1.0, 2.0]], requires_grad=True)
    (gradient,) = torch.autograd.grad(geometry.distance_matrix(x, x).sum(), x)
    assert (gradient == 0).all()


# Precision


@pytest.mark.parametrize("distance", [geometry.euclidean, geometry.cosine, geometry.distance_matrix])
def test_autocast_does_not_reach_in(distance: geometry.Distance) -> None:
    x, y = points(4, 32, dtype=torch.float32), points(4, 32, "others", torch.float32)
    plain = distance(x, y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(distance(x, y), plain)
        assert geometry.unit(x).dtype == torch.float32
        assert distance(x.bfloat16(), y.bfloat16()).dtype == torch.float32
        assert distance(x.double(), y.double()).dtype == torch.float64


# Retrieval


@pytest.mark.parametrize("chunk", [1, 7, 1024])
def test_retrieve_matches_loops_with_ties_and_without_self(chunk: int) -> None:
    gallery, labels = grid(40), torch.arange(40) % 3
    own = torch.arange(40).where(torch.arange(40) % 4 > 0, -1)
    found = geometry.retrieve(gallery, gallery, 9, query_labels=labels, gallery_labels=labels, exclude=own, chunk=chunk)
    for q, row in enumerate(gallery.tolist()):
        distances = [reference.distance(row, x) for x in gallery.tolist()]
        expected = reference.ordered(distances, int(own[q]))[:9]
        assert found.ids[q].tolist() == expected
        assert found.distances[q].tolist() == pytest.approx([distances[i] for i in expected])
        assert found.relevant[q].tolist() == [bool(labels[i] == labels[q]) for i in expected]


@pytest.mark.parametrize("width", [1, 8, 64, 10**6])
@pytest.mark.parametrize("kind", ["grid", "noise", "collapsed", "far first", "nan"])
def test_the_nearest_are_those_of_a_stable_sort_in_whatever_tiles(
    kind: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 2500
    gallery = {
        "grid": grid(count),  # most distances are equal to others, in one tile and in several
        "noise": points(count, 8).float(),
        "collapsed": torch.ones(count, 3),
        "far first": torch.arange(count, 0, -1).unsqueeze(1).float(),  # each tile is nearer than all before
        "nan": points(count, 8),
    }[kind]
    query, own = gallery[::50], torch.arange(count)[::50].where(torch.arange(50) % 4 > 0, -1)
    if kind == "nan":
        gallery = gallery.clone()
        gallery[[3, 77, 2499]] = torch.nan
    monkeypatch.setattr(geometry, "_WIDTH", width)
    monkeypatch.setattr(geometry, "_LARGE", 0)
    for k in (1, 3, 8, 20):
        (((_, values, ids)),) = geometry.nearest_rows(query, gallery, k, exclude=own)
        (((_, distances)),) = geometry.distance_rows(query, gallery, exclude=own)
        order = distances.argsort(stable=True)[:, :k]
        if kind == "noise":  # the product in tiles is rounded otherwise
            assert (
                torch.allclose(values, distances.gather(1, order), atol=2e-3) and (ids == order).double().mean() > 0.99
            )
        else:
            assert torch.equal(ids, order)
            assert torch.allclose(values, distances.gather(1, order), atol=1e-6, equal_nan=True)


def test_self_is_left_out_by_identity_among_duplicates() -> None:
    gallery = torch.ones(5, 3)
    ids = geometry.retrieve(gallery, gallery, 4, exclude=torch.arange(5)).ids
    assert ids.tolist() == [[i for i in range(5) if i != q] for q in range(5)]


def test_retrieve_in_fp32_finds_what_float64_finds() -> None:
    query, gallery = geometry.unit(points(50, 64)), geometry.unit(points(300, 64, "gallery"))
    exact = geometry.retrieve(query, gallery, 10)
    single = geometry.retrieve(query.float(), gallery.float(), 10, chunk=7)
    assert single.distances.dtype == torch.float32
    assert torch.allclose(single.distances.double(), exact.distances, atol=1e-5)
    assert (single.ids == exact.ids).double().mean() > 0.99


@pytest.mark.parametrize("k", [0, 5, 99])
def test_retrieve_refuses_more_than_there_is(k: int) -> None:
    with pytest.raises(DataError, match="choose k from 1 to 4"):
        geometry.retrieve(points(5), points(5), k, exclude=torch.arange(5))


def test_bad_input_is_named() -> None:
    with pytest.raises(DataError, match="do not fit together"):
        geometry.retrieve(points(5, 3), points(5, 4), 1)
    with pytest.raises(DataError, match="one side only"):
        geometry.retrieve(points(5), points(5), 1, query_labels=torch.arange(5))
    with pytest.raises(DataError, match="exclude must hold positions"):
        geometry.retrieve(points(5), points(5), 1, exclude=torch.full((5,), 5))
    with pytest.raises(DataError, match="targets has shape"):
        geometry.ranks(points(5), points(5), torch.zeros(4, dtype=torch.long))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("side", ["query", "gallery"])
def test_what_is_not_finite_has_no_order(side: str, bad: float) -> None:
    sides = {"query": points(5), "gallery": points(5)}
    sides[side][3, 2] = bad
    with pytest.raises(DataError, match=f"embeddings are not finite: {side} has"):
        geometry.retrieve(**sides, k=1)
    with pytest.raises(DataError, match=f"embeddings are not finite: {side} has"):
        geometry.ranks(**sides, targets=torch.zeros(5, dtype=torch.long))


# Ranks


@pytest.mark.parametrize("chunk", [1, 7, 1024])
def test_ranks_match_loops(chunk: int) -> None:
    gallery, count = grid(40), 40
    own = torch.arange(count).where(torch.arange(count) % 4 > 0, -1)
    targets = Key.of(1).integers(torch.arange(count * 3), count).reshape(count, 3)
    targets[5, 0] = 5  # a query may be its own target
    found = geometry.ranks(gallery, gallery, targets, exclude=own, chunk=chunk)
    for q, row in enumerate(gallery.tolist()):
        distances = [reference.distance(row, x) for x in gallery.tolist()]
        assert found[q].tolist() == [reference.rank(distances, t, int(own[q])) for t in targets[q].tolist()]
    assert torch.equal(geometry.ranks(gallery, gallery, targets[:, 0], exclude=own), found[:, 0])


def test_ranks_and_retrieve_agree() -> None:
    query, gallery = points(20), points(100, purpose="gallery")
    ids = geometry.retrieve(query, gallery, 100).ids
    assert torch.equal(geometry.ranks(query, gallery, ids), torch.arange(100).expand(20, 100))


def test_no_gradient_is_recorded() -> None:
    query = points(4).requires_grad_()
    assert not geometry.retrieve(query, query, 2).distances.requires_grad
    for _, distances in geometry.distance_rows(query, query):
        assert not distances.requires_grad
        assert torch.is_grad_enabled()  # only the walk itself is without gradient


def test_no_query_by_gallery_matrix_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[torch.Size] = []
    plain = geometry._smallest

    def watched(distances: Tensor, k: int) -> tuple[Tensor, Tensor]:
        shapes.append(distances.shape)
        return plain(distances, k)

    monkeypatch.setattr(geometry, "_smallest", watched)
    geometry.retrieve(points(50), points(90, purpose="gallery"), 3, chunk=16)
    assert [tuple(shape) for shape in shapes] == [(16, 90), (16, 90), (16, 90), (2, 90)]
