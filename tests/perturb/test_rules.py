"""Steps along a running mean, by Adam or momentum: against plain loops, closed forms, and where signed steps fail."""

from typing import Any

import pytest
import torch
from torch import Tensor

from anchorhold.errors import SettingsError
from anchorhold.perturb.ascend import ascend
from anchorhold.perturb.ball import Ball
from anchorhold.perturb.problem import Objective, Problem
from anchorhold.perturb.settings import Budget
from anchorhold.random import Key
from tests.analytic import draw, linear_embedder, tanh_embedder, towards

FREE: dict[str, Any] = {"low": -1e9, "high": 1e9}
KEY = Key.of(3)
RULES = ("adam", "momentum")


def pictures(units: int) -> Tensor:
    return KEY("pictures").uniform(torch.arange(units), (1, 1, 3, 3))


def budget(rule: Any, steps: int = 40, **changes: Any) -> Budget:
    return Budget(steps, **{"alpha": 0.02, "keep": "best", "schedule": "linear", "rule": rule, **changes})


def in_a_plain_loop(
    embed: Any, x: Tensor, objective: Objective, ball: Ball, rule: str, steps: int, alpha: float
) -> Tensor:
    """One unit at a time."""
    found = []
    for unit in range(len(x)):
        clean = x[unit : unit + 1]
        here, best, level = clean.clone(), clean.clone(), -torch.inf
        mean, square, at = torch.zeros_like(here), torch.zeros_like(here), torch.tensor([unit])
        for step in range(steps + 1):
            here = here.detach().requires_grad_()
            value = objective.value(embed(here[:, 0])[:, None], at)
            if value.item() > level:
                best, level = here.detach().clone(), value.item()
            (g,) = torch.autograd.grad(value.sum(), here)
            g = g / g.abs().mean()
            length = alpha * (1 - step / steps)
            if rule == "momentum":
                mean = mean + g
                way = mean.sign() if ball.norm == "linf" else mean / mean.norm()
            else:
                mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g * g
                way = (mean / (1 - 0.9 ** (step + 1))) / ((square / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)
                way = way if ball.norm == "linf" else mean / mean.norm()
            here = ball.project(here.detach() + length * way, clean)
        found.append(best)
    return torch.cat(found)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_the_steps_are_those_of_a_plain_loop(rule: str, norm: Any) -> None:
    embed, x = tanh_embedder(9), pictures(6)
    goal, ball = towards(draw(6, 6)), Ball(0.1 if norm == "linf" else 0.3, norm)
    found = ascend(Problem(embed, goal, ball, budget(rule, 12)), x)
    assert torch.allclose(found.images, in_a_plain_loop(embed, x, goal, ball, rule, 12, 0.02), atol=1e-10)
    assert found.image_steps == 6 * 12


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("norm", "order"), [("linf", 1), ("l2", 2)])
def test_they_reach_the_closed_form_on_a_linear_embedder(rule: str, norm: Any, order: int) -> None:
    embed, weight = linear_embedder(9)
    x, aim, eps = pictures(8), draw(8, 5), 0.1
    found = ascend(Problem(embed, towards(aim), Ball(eps, norm, **FREE), budget(rule, 60)), x)
    slope = aim @ weight
    start = (embed(x[:, 0]) * aim).sum(1)
    assert found.value is not None
    assert torch.allclose(found.value, start + eps * slope.norm(order, dim=1), atol=2e-3)


@pytest.mark.parametrize("rule", RULES)
def test_they_stay_in_ball_and_range_whatever_the_batch_and_who_leaves(rule: str) -> None:
    embed, x = tanh_embedder(9), pictures(9)
    level = 0.3
    value = towards(draw(9, 6)).value
    goal = Objective(lambda e, at: value(e, at).clamp(max=level), top=level)
    one = ascend(Problem(embed, goal, Ball(0.08), budget(rule, start="random"), KEY), x)
    parts = ascend(Problem(embed, goal, Ball(0.08), budget(rule, start="random"), KEY), x, batch=4)
    whole = ascend(Problem(embed, goal, Ball(0.08), budget(rule, start="random", drop=False), KEY), x)
    assert torch.equal(one.images, parts.images) and one.image_steps < whole.image_steps == 9 * 40
    assert one.value is not None and whole.value is not None and torch.allclose(one.value, whole.value)
    assert (one.images - x).abs().max() <= 0.08 + 1e-12 and one.images.min() >= 0 and one.images.max() <= 1


def test_a_mean_crosses_the_ridge_that_signed_steps_zigzag_on() -> None:
    """Two pixels, value = x − 20 |y − x/2|: the way up is a ridge, and the gradient's sign jumps across it."""

    def embed(x: Tensor) -> Tensor:
        return x.flatten(1)

    ridge = Objective(lambda e, at: e[:, 0, 0] - 20 * (e[:, 0, 1] - e[:, 0, 0] / 2).abs())
    x, ball = torch.zeros(1, 1, 1, 1, 2, dtype=torch.float64), Ball(1.0, **FREE)
    reached = {}
    for rule in ("steepest", *RULES):
        how = budget(rule, 400, alpha=0.25)
        found = ascend(Problem(embed, ridge, ball, how), x)
        assert found.value is not None
        reached[rule] = float(found.value)
    assert reached["steepest"] < 0.5 < 0.8 < min(reached[rule] for rule in RULES), reached


@pytest.mark.parametrize("rule", RULES)
def test_what_they_cannot_do_is_one_line(rule: str) -> None:
    embed, x = tanh_embedder(9), pictures(2)
    still = Objective(lambda e, at: e.square().sum((1, 2)), first=lambda e, at: e.sum((1, 2)))
    with pytest.raises(SettingsError, match="keeps its best iterate"):
        Budget(rule=rule)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="stationary at the clean image"):
        ascend(Problem(embed, still, Ball(0.1), budget(rule)), x)
    with pytest.raises(SettingsError, match="cannot be measured"):
        ascend(Problem(embed, towards(draw(2, 6)), Ball(0.1), budget(rule)), x, watch=lambda *_: None)
    with pytest.raises(SettingsError, match="one number per unit"):
        ascend(Problem(embed, Objective(lambda e, at: e.sum()), Ball(0.1), budget(rule)), x)
