"""NES: its estimate against the true gradient, closed forms, exact counts, and models that have no gradient."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from anchorhold.errors import SettingsError
from anchorhold.perturb.ball import Ball
from anchorhold.perturb.nes import estimate, nes
from anchorhold.perturb.problem import Objective, Problem
from anchorhold.perturb.settings import Budget
from anchorhold.random import Key
from tests.analytic import draw, linear_embedder, tanh_embedder, towards

FREE = {"low": -1e9, "high": 1e9}
KEY = Key.of(7)


def pictures(units: int, side: int = 3) -> Tensor:
    return KEY("pictures").uniform(torch.arange(units), (1, 1, side, side))


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_the_estimate_points_where_the_gradient_does(norm: str) -> None:
    embed, goal = tanh_embedder(9), towards(draw(4, 6))
    x, rows = pictures(4)[:, 0].requires_grad_(), torch.arange(4)

    def ask(images: Tensor, at: Tensor) -> Tensor:
        return goal.value(embed(images)[:, None], at)

    (true,) = torch.autograd.grad(ask(x, rows).sum(), x)
    ball, clean = Ball(1.0, norm, **FREE), x.detach()  # type: ignore[arg-type]
    close = []
    for pairs in (5, 50, 2000):
        found = estimate(ask, ball, clean, clean, rows, draw(pairs, 4, 1, 3, 3), 1e-4)
        close.append(float(F.cosine_similarity(found.flatten(1), true.flatten(1)).min()))
    assert close[0] < close[1] < close[2] and close[2] > 0.99
    assert torch.allclose(found, true, atol=0.15 * float(true.abs().max()))  # the size too, not the direction alone


@pytest.mark.medium
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_it_approaches_the_linear_closed_form(norm: str) -> None:
    embed, weight = linear_embedder(9)
    x, target, eps = pictures(6), draw(6, 5), 0.1
    found = nes(Problem(embed, towards(target), Ball(eps, norm, **FREE), Budget(2000), KEY), x)  # type: ignore[arg-type]
    gain = ((embed(found.images[:, 0]) - embed(x[:, 0])) * target).sum(1)
    best = eps * (target @ weight).norm(p=1 if norm == "linf" else 2, dim=1)
    assert (gain >= 0.95 * best).all() and (gain <= best * (1 + 1e-9)).all()


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_all_that_is_asked_about_lies_in_the_ball_and_the_best_is_kept(norm: str) -> None:
    embed, x, goal, asked = tanh_embedder(9), pictures(5), towards(draw(5, 6)), list[Tensor]()
    x[:2] = x[:2].round()

    def spied(images: Tensor) -> Tensor:
        asked.append(images)
        return embed(images)

    found = nes(Problem(spied, goal, Ball(0.2, norm), Budget(100), KEY), x)  # type: ignore[arg-type]
    tried = torch.stack(asked) - x[:, 0]
    size = tried.abs().amax() if norm == "linf" else tried.flatten(2).norm(dim=2).amax()
    assert size <= 0.2 * (1 + 1e-9) and torch.stack(asked).min() >= 0 and torch.stack(asked).max() <= 1
    values = torch.stack([goal.value(embed(each)[:, None], torch.arange(5)) for each in asked])
    assert torch.allclose(found.value, values.amax(0)) and (found.value > values[0]).all()  # type: ignore[arg-type, operator]
    assert torch.allclose(goal.value(embed(found.images[:, 0])[:, None], torch.arange(5)), values.amax(0))


@pytest.mark.parametrize("budget", [0, 1, 2, 3, 21, 22, 24, 40, 100])
def test_queries_are_counted_and_never_exceeded(budget: int) -> None:
    asked = 0

    def counted(images: Tensor) -> Tensor:
        nonlocal asked
        asked += len(images)
        return tanh_embedder(9)(images)

    found = nes(Problem(counted, towards(draw(3, 6)), Ball(0.1), Budget(budget), KEY), pictures(3))
    assert found.queries == asked <= 3 * (1 + budget) and found.image_steps == 0
    assert budget < 3 or asked >= 3 * budget - 3  # at most two are left over


def test_it_climbs_where_there_is_no_gradient_and_depends_on_ids_alone() -> None:
    def rounded(x: Tensor) -> Tensor:
        return tanh_embedder(9)((x * 8).round() / 8)

    x, target = pictures(6), draw(6, 6)
    whole = nes(Problem(rounded, towards(target), Ball(0.2), Budget(120), KEY), x)
    clean = towards(target).value(rounded(x[:, 0])[:, None], torch.arange(6))
    assert (whole.value > clean).all()  # type: ignore[operator]
    part = nes(Problem(rounded, towards(target[3:]), Ball(0.2), Budget(120), KEY), x[3:], ids=torch.arange(3, 6))
    assert torch.allclose(whole.images[3:], part.images, atol=1e-12)


def test_a_unit_that_met_its_goal_is_kept_and_asks_no_more() -> None:
    x = torch.full((8, 1, 1, 2, 2), 0.5, dtype=torch.float64)
    brighter = Objective(lambda e, at: -(e[:, 0] - 0.5).abs().sum(1), lambda e, at: e[:, 0].mean(1) > 0.52)
    found = nes(Problem(lambda images: images.flatten(1), brighter, Ball(0.1), Budget(200), KEY), x)
    assert (found.images.flatten(1).mean(1) > 0.52).all() and found.queries < 8 * 100


def test_what_it_cannot_do_is_one_line() -> None:
    problem = Problem(tanh_embedder(9), towards(draw(2, 6)), Ball(0.1), Budget(5, start="random"), KEY)
    with pytest.raises(SettingsError, match="start out"):
        nes(problem, pictures(2))
    still = nes(Problem(tanh_embedder(9), towards(draw(2, 6)), Ball(0.0), Budget(50), KEY), pictures(2))
    assert torch.equal(still.images, pictures(2))
