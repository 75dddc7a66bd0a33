"""Objectives over classes: against plain loops, with gradients, at the end of their goal; starts that differ."""

import math

import pytest
import torch
from torch import Tensor

from anchorhold.attacks.class_losses import cross_entropy, diverse_starts, dlr, has_class_losses, soft_margin
from anchorhold.attacks.goal import Scene
from anchorhold.attacks.label import LabelAttack
from anchorhold.attacks.menu import goal_named
from anchorhold.attacks.recall import MarginAttack
from anchorhold.geometry import unit
from anchorhold.perturb.ball import Ball
from anchorhold.perturb.problem import Objective, Problem
from anchorhold.random import Key

torch.manual_seed(0)
SCENE = Scene.of(unit(torch.randn(24, 5, dtype=torch.float64)), torch.arange(24) % 4 * 3)  # classes 0, 3, 6, 9
IDS = torch.tensor([1, 5, 10, 20])
GOAL = MarginAttack()


def by_hand(e: Tensor, query: int, kind: str, temperature: float) -> float:
    """One query, in plain loops."""
    label = int(SCENE.labels[query])
    away = {item: math.dist(e.tolist(), SCENE.gallery[item].tolist()) for item in range(24)}
    largest = max(away.values())
    listed = list(away.values())
    sigma = torch.tensor(listed, dtype=torch.float64).std().item()
    listed[query] = largest + 1e3 * sigma  # its own image never counts
    spread = temperature * sigma
    near = {k: min(listed[i] for i in range(24) if int(SCENE.gallery_labels[i]) == k) for k in (0, 3, 6, 9)}
    if kind == "ce":
        total = sum(math.exp(-(near[k] - near[label]) / spread) for k in near)
        return math.log(total)
    if kind == "dlr":
        order = sorted(near.values())
        return (near[label] - min(near[k] for k in near if k != label)) / (order[2] - order[0])

    def soft(match: bool) -> float:
        return math.log(
            sum(math.exp(-listed[i] / spread) for i in range(24) if (int(SCENE.labels[i]) == label) == match)
        )

    return soft(False) - soft(True)


@pytest.mark.parametrize(
    ("kind", "make", "temperature"),
    [
        ("ce", cross_entropy(1.0), 1.0),
        ("ce", cross_entropy(0.1), 0.1),
        ("dlr", dlr, 1.0),
        ("soft", soft_margin(0.3), 0.3),
    ],
)
def test_the_value_is_that_of_plain_loops_and_its_gradient_right(kind: str, make: object, temperature: float) -> None:
    objective = make(GOAL, SCENE, IDS, None)  # type: ignore[operator]
    e = unit(torch.randn(4, 5, dtype=torch.float64))
    found = objective.value(e[:, None], torch.arange(4))
    assert found.tolist() == pytest.approx([by_hand(e[r], int(IDS[r]), kind, temperature) for r in range(4)], rel=1e-4)
    rows = torch.tensor([2, 0])  # positions index the batch: some units may have left
    assert torch.allclose(objective.value(e[rows][:, None], rows), found[rows])
    # σ is a constant in the gradient, so it is held while differences are taken.
    x = e.clone().requires_grad_()
    (slope,) = torch.autograd.grad(objective.value(x[:, None], torch.arange(4)).sum(), x)
    assert slope.isfinite().all() and slope.abs().amax() > 0


def test_climbing_them_makes_the_neighbour_wrong_and_ends_there() -> None:
    for make in (cross_entropy(1.0), dlr, soft_margin(0.03)):
        objective = make(GOAL, SCENE, IDS, None)
        right = GOAL.right(SCENE, IDS, SCENE.queries[IDS])
        met = objective.met(SCENE.queries[IDS][:, None], torch.arange(4))
        assert met is not None and met.tolist() == (right < 0.5).tolist()
        assert objective.coupled is False and objective.top is None


def test_a_class_with_one_item_and_labels_of_strangers_stay_finite() -> None:
    scene = Scene(SCENE.gallery[:4], torch.tensor([0, 3, 6, 9]), SCENE.queries, SCENE.labels + 1, torch.arange(24) % 4)
    for make in (cross_entropy(1.0), dlr, soft_margin(0.03)):
        x = scene.queries[IDS].clone().requires_grad_()
        value = make(GOAL, scene, IDS, None).value(x[:, None], torch.arange(4))
        finite = value.isfinite()
        (slope,) = torch.autograd.grad(value[finite].sum(), x)
        assert slope.isfinite().all()


def test_they_belong_to_goals_about_the_nearest_neighbour() -> None:
    assert has_class_losses(GOAL) and has_class_losses(LabelAttack(targeted=False))
    assert not has_class_losses(LabelAttack(targeted=True))
    assert not any(has_class_losses(goal_named(name, "corrected")) for name in ("CA+", "QA-", "TMA", "ES", "GTT"))


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_diverse_starts_lie_in_the_ball_and_move_the_embedding_further_than_noise(norm: str) -> None:
    torch.manual_seed(1)
    weight = torch.randn(12, 3, dtype=torch.float64)
    images, ids = torch.rand(40, 1, 3, 2, 2, dtype=torch.float64), torch.arange(40)
    ball = Ball(0.1, norm)  # type: ignore[arg-type]

    def embed(x: Tensor) -> Tensor:
        return x.flatten(1) @ weight

    problem = Problem(embed, Objective(lambda e, positions: e[:, 0, 0]), ball)
    found = diverse_starts(problem, images, ids, Key.of(0))
    size = (found - images).flatten(1)
    assert (size.abs().amax(1) if norm == "linf" else size.norm(dim=1)).max() <= 0.1 + 1e-12
    assert found.min() >= 0 and found.max() <= 1
    noise = ball.start(images, Key.of(1), ids)
    moved = [(embed(x[:, 0]) - embed(images[:, 0])).norm(dim=1).mean() for x in (found, noise)]
    assert moved[0] > 1.5 * moved[1]
    assert torch.equal(found, diverse_starts(problem, images, ids, Key.of(0)))
    some = torch.tensor([3, 17])  # a start is a function of key and id
    assert torch.equal(found[some], diverse_starts(problem, images[some], some, Key.of(0)))
    assert not torch.equal(found, diverse_starts(problem, images, ids, Key.of(2)))
