"""Separability, d̄ and R@1 beyond chance: values by plain loops, errors by leaving out images for real."""

import pytest
import torch
from torch import Tensor

from anchorhold.geometry import unit
from anchorhold.random import Key
from anchorhold.separation import Estimate, separation


def points(count: int, dim: int = 8) -> Tensor:
    return unit(Key.of(4)("points").normal(torch.arange(count), (dim,)))


def plain(e: Tensor, labels: Tensor) -> tuple[float, float]:
    """Separability and d̄ of images that are queries and gallery, by loops."""
    differences, means = [], []
    for i in range(len(e)):
        d = {j: float((e[i] - e[j]).norm()) for j in range(len(e)) if j != i}
        same, other = ([d[j] for j in d if (labels[j] == labels[i]) == match] for match in (True, False))
        means.append(sum(d.values()) / len(d))
        if same and other:
            differences.append(sum(other) / len(other) - sum(same) / len(same))
    mean = sum(means) / len(means)
    return sum(differences) / len(differences) / mean, mean


def test_values_and_errors_against_loops() -> None:
    e, labels = points(14), torch.tensor([0] * 5 + [1] * 6 + [2] * 3)
    found = separation(e, labels, e, labels, torch.arange(14), Key.of(0))
    value, mean = plain(e, labels)
    assert found.separability.value == pytest.approx(value) and found.distance.value == pytest.approx(mean)
    left = [plain(e[keep], labels[keep]) for k in range(14) for keep in [torch.arange(14) != k]]
    for place, estimate in enumerate((found.separability, found.distance)):
        column = torch.tensor([each[place] for each in left], dtype=torch.float64)
        assert estimate.error == pytest.approx(float(column.var(correction=0) * 13) ** 0.5)
    assert found.queries == 14 and found.chance == pytest.approx((5 * 4 + 6 * 5 + 3 * 2) / 14 / 13)
    nearest = torch.cdist(e, e).fill_diagonal_(9).argmin(1)
    assert found.r1 == pytest.approx(float((labels[nearest] == labels).double().mean()))
    assert found.skill.value == pytest.approx((found.r1 - found.chance) / (1 - found.chance))


def test_queries_that_the_gallery_does_not_hold_add_their_own_error() -> None:
    e, labels = points(30), torch.arange(30) % 3
    query, gallery = (e[:10], labels[:10]), (e[10:], labels[10:])
    found = separation(*query, *gallery, torch.full((10,), -1), Key.of(0))

    def ratio(asks: Tensor, items: Tensor) -> float:
        d = torch.cdist(query[0][asks], gallery[0][items])
        match = query[1][asks, None] == gallery[1][items]
        rows = (d * ~match).sum(1) / (~match).sum(1) - (d * match).sum(1) / match.sum(1)
        return float(rows.mean() / d.mean())

    ten, twenty = torch.arange(10), torch.arange(20)
    assert found.separability.value == pytest.approx(ratio(ten, twenty))
    one = torch.tensor([ratio(ten[ten != k], twenty) for k in range(10)], dtype=torch.float64)
    other = torch.tensor([ratio(ten, twenty[twenty != k]) for k in range(20)], dtype=torch.float64)
    expected = (one.var(correction=0) * 9 + other.var(correction=0) * 19) ** 0.5
    assert found.separability.error == pytest.approx(float(expected))


@pytest.mark.slow
def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    """Random points have separability 0: its upper end is below that in about 1 of 20 draws, its lower end above."""
    labels, below, above = torch.arange(6).repeat_interleave(8), 0, 0
    for seed in range(200):
        e = unit(Key.of(seed)("points").normal(torch.arange(48), (16,)))
        found = separation(e, labels, e, labels, torch.arange(48), Key.of(seed)).separability
        below, above = below + (found.high < 0), above + (found.low > 0)
    assert below <= 24 and above <= 24 and below + above >= 2


def test_a_hub_is_one_piece_of_evidence() -> None:
    """All queries answer with one image: R@1 is the share of its class, and says nothing whatever their number."""
    e = unit(torch.cat([torch.ones(1, 4), torch.eye(4)[:1].repeat(99, 1) + torch.linspace(0.01, 0.5, 99)[:, None]]))
    labels = (torch.arange(100) >= 90).long()
    gallery = torch.cat([e[:1], -e[1:]])
    found = separation(e[1:], labels[1:], gallery, labels, torch.full((99,), -1), Key.of(0))
    assert found.r1 > 0.85 and found.skill.low < 0.1


def test_ends_are_one_sided_95_percent() -> None:
    one = Estimate(1.0, 0.1)
    assert (one.low, one.high) == pytest.approx((1 - 0.1645, 1 + 0.1645))
