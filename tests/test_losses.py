"""Losses against plain loops, closed forms and torch."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from anchorhold import geometry, losses
from anchorhold.random import Key
from tests import reference
from tests.reference import Rows


def embeddings(rows: int = 6, columns: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    a, p, n = (geometry.unit(Key.of(0)(part).normal(torch.arange(rows), (columns,))) for part in ("a", "p", "n"))
    return a, p, geometry.unit(torch.cat([a[:2] + 0.3 * n[:2], n[2:]]))  # the first two pairs are near


@pytest.mark.parametrize("margin", [0.0, 0.2, 1.0])
def test_triplet_matches_loops(margin: float) -> None:
    a, p, n = embeddings()
    rows: tuple[Rows, Rows, Rows] = (a.tolist(), p.tolist(), n.tolist())
    assert float(losses.triplet(a, p, n, margin)) == pytest.approx(reference.triplet(*rows, margin=margin), abs=1e-12)
    slow = reference.triplet(*rows, margin=margin, metric=reference.cosine)
    assert float(losses.triplet(a, p, n, margin, geometry.cosine)) == pytest.approx(slow, abs=1e-12)


def test_triplet_is_torch_s_own_where_torch_allows_the_margin() -> None:
    a, p, n = embeddings()
    assert torch.allclose(losses.triplet(a, p, n, 0.2), F.triplet_margin_loss(a, p, n, 0.2), atol=1e-12)


def test_triplet_reductions_count_zeros() -> None:
    a, p, n = embeddings()
    each = losses.triplet(a, p, n, reduction="none")
    assert each.shape == (6,)
    assert (each == 0).any()
    assert (each > 0).any()
    assert losses.triplet(a, p, n) == each.sum() / 6
    assert losses.triplet(a, p, n, reduction="sum") == each.sum()


@pytest.mark.parametrize("reduction", ["active", "all"])
@pytest.mark.parametrize("margin", [0.0, 0.5, 1.0, 2.5])
def test_contrastive_matches_loops(margin: float, reduction: str) -> None:
    a, p, n = embeddings()
    slow = reference.contrastive(a.tolist(), p.tolist(), n.tolist(), margin, reduction)
    fast = losses.contrastive(a, p, n, margin, reduction=reduction)  # type: ignore[arg-type]
    assert float(fast) == pytest.approx(slow, abs=1e-12)


def test_contrastive_without_active_pairs_is_the_pull_alone() -> None:
    a, p, _ = embeddings()
    pull, push = losses.contrastive_terms(a, p, -a)
    assert (push == 0).all()
    assert losses.contrastive(a, p, -a) == pull.mean()
    assert torch.isclose(losses.contrastive(a, p, -a, reduction="all"), pull.mean() / 2)


@pytest.mark.parametrize(
    "loss",
    [
        lambda a, p, n: losses.triplet(a, p, n, 0.5),
        lambda a, p, n: losses.triplet(a, p, n, 0.5, geometry.cosine),
        lambda a, p, n: losses.contrastive(a, p, n),
        lambda a, p, n: losses.contrastive(a, p, n, reduction="all"),
    ],
)
def test_gradients(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    a, p, n = (x.clone().requires_grad_() for x in embeddings())
    assert torch.autograd.gradcheck(loss, (a, p, n))
    # Three times the same point: every distance is zero.
    x = embeddings()[0].float().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(x, x, x), x)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("distance", [geometry.euclidean, geometry.cosine])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "how", [("triplet", "mean"), ("triplet", "sum"), ("contrastive", "active"), ("contrastive", "all")]
)
def test_no_triplets_cost_nothing(how: tuple[str, str], dtype: torch.dtype, distance: geometry.Distance) -> None:
    points = torch.ones(5, 3, dtype=dtype, requires_grad=True)
    none = points[:0]
    loss = getattr(losses, how[0])(none, none, none, distance=distance, reduction=how[1])
    assert (loss.item(), loss.shape, loss.dtype) == (0.0, (), dtype)
    (gradient,) = torch.autograd.grad(loss, points)
    assert torch.equal(gradient, torch.zeros_like(points))


def test_ics_in_closed_form() -> None:
    """ICS is a triplet loss with margin zero: max(0, d(a, a') - d(a, p)), here 3 - 1 and max(0, 1 - 2)."""
    a = torch.zeros(2, 1, dtype=torch.float64)
    moved, positive = torch.tensor([[3.0], [1.0]]).double(), torch.tensor([[1.0], [2.0]]).double()
    assert float(losses.triplet(a, moved, positive, margin=0)) == pytest.approx(1.0)


def test_autocast_stays_single_precision() -> None:
    a, p, n = (x.float() for x in embeddings())
    plain = losses.triplet(a, p, n), losses.contrastive(a, p, n)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (losses.triplet(a, p, n), losses.contrastive(a, p, n)) == plain
        assert losses.triplet(a.bfloat16(), p.bfloat16(), n.bfloat16()).dtype == torch.float32
