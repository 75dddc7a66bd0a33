"""Square in an L2 ball: its pattern, the ball, the closed form, and draws that depend on ids alone."""

import pytest
import torch
from torch import Tensor

from anchorhold.attacks.goal import Scene
from anchorhold.attacks.menu import ATTACKS, goal_named
from anchorhold.perturb.ball import Ball
from anchorhold.perturb.problem import Objective, Problem
from anchorhold.perturb.settings import Budget
from anchorhold.perturb.square import square
from anchorhold.perturb.square_l2 import eta, first_l2, moved_l2
from anchorhold.perturb.windows import Windows
from anchorhold.random import Key
from tests.analytic import draw, linear_embedder, tanh_embedder, towards
from tests.attacking import attack
from tests.attacks import world

FREE = {"low": -1e9, "high": 1e9}
KEY = Key.of(7)


def pictures(units: int, side: int = 8, channels: int = 1) -> Tensor:
    return KEY("pictures").uniform(torch.arange(units), (1, channels, side, side))


def length(shift: Tensor) -> Tensor:
    return shift.flatten(1).norm(dim=1)


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (3, 3), (4, 7), (9, 9)])
def test_eta_has_length_one_and_two_halves_of_opposite_sign(size: tuple[int, int]) -> None:
    made = eta(*size)
    assert made.shape == size and made.norm() == pytest.approx(1)
    upper, lower = made[: size[0] // 2], made[size[0] // 2 :]
    assert (upper > 0).all() and (lower < 0).all()


def test_eta_by_hand() -> None:
    """A half of 1 × 3 pixels: the middle is in both rectangles, 1 + 1/4, its neighbours in the second, 1/4."""
    half = torch.tensor([[0.25, 1.25, 0.25]], dtype=torch.float64)
    made = torch.cat([half, -half]) / (2**0.5 * half.norm())
    assert torch.allclose(eta(2, 3), made)


def test_windows_lie_inside_and_hold_their_pattern() -> None:
    ids = torch.arange(200)
    windows = Windows.drawn(KEY, 3, ids, (5, 7), (3, 3))
    inside = windows.inside()
    assert (inside.sum((1, 2)) == 9).all() and inside.any(0).all()
    pattern = draw(200, 3, 3)
    placed = windows.placed(pattern)
    assert torch.equal(placed[inside].reshape(200, 3, 3), pattern) and (placed[~inside] == 0).all()
    assert Windows.drawn(KEY, 3, ids, (5, 7), (9, 9)).inside().all()  # no larger than the image


def test_a_move_changes_two_windows_and_keeps_the_length() -> None:
    clean, ball, ids = pictures(40)[:, 0], Ball(0.5, "l2", **FREE), torch.arange(40)
    begun = first_l2(ball, clean, KEY, ids)
    assert torch.allclose(length(begun - clean), torch.full((40,), 0.5, dtype=torch.float64))
    moved = moved_l2(ball, clean, begun, KEY, ids, 5, 3.0)
    assert torch.allclose(length(moved - clean), torch.full((40,), 0.5, dtype=torch.float64))
    both = Windows.drawn(KEY, 5, ids, (8, 8), (3, 3)).inside()
    both |= Windows.drawn(KEY, 5, ids, (8, 8), (3, 3), "second ").inside()
    same = (moved - begun).abs()[:, 0] < 1e-9
    assert (same == ~both).double().mean() > 0.95  # what leaves window two may be zero already
    assert (same & ~both).sum() == (~both).sum()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_ball_and_the_range_are_never_left_and_values_never_fall(channels: int, dtype: torch.dtype) -> None:
    embed = tanh_embedder(64 * channels)
    x = pictures(8, channels=channels).to(dtype)
    x[:4] = x[:4].round()  # black and white pixels, which the clamp binds
    goal, asked = towards(draw(8, 6)), list[Tensor]()

    def spied(images: Tensor) -> Tensor:
        asked.append(images)
        return embed(images.double())

    found = square(Problem(spied, goal, Ball(0.7, "l2"), Budget(200), KEY), x)
    tried = torch.stack(asked[1:])
    assert (tried - x[:, 0]).flatten(2).norm(dim=2).max() <= 0.7 * (1 + 1e-6)
    assert tried.min() >= 0 and tried.max() <= 1 and found.queries == 8 * 201
    values = torch.stack([goal.value(embed(each.double())[:, None], torch.arange(8)) for each in asked])
    assert torch.allclose(found.value, values.amax(0))  # type: ignore[arg-type]
    assert (found.value > values[0]).all()  # type: ignore[operator]


@pytest.mark.medium
def test_it_approaches_the_linear_closed_form() -> None:
    embed, weight = linear_embedder(64)
    x, target = pictures(6), draw(6, 5)
    shares = []
    for queries in (50, 300, 1500):
        found = square(Problem(embed, towards(target), Ball(0.5, "l2", **FREE), Budget(queries), KEY), x)
        gain = ((embed(found.images[:, 0]) - embed(x[:, 0])) * target).sum(1)
        shares.append(float((gain / (0.5 * (target @ weight).norm(dim=1))).mean()))
    assert shares == sorted(shares) and 0.77 < shares[2] <= 1 + 1e-9


def test_draws_depend_on_ids_and_not_on_the_batch() -> None:
    embed, x, target, ball = tanh_embedder(64), pictures(6), draw(6, 6), Ball(0.5, "l2")
    whole = square(Problem(embed, towards(target), ball, Budget(40), KEY), x)
    part = square(Problem(embed, towards(target[3:]), ball, Budget(40), KEY), x[3:], ids=torch.arange(3, 6))
    assert torch.allclose(whole.images[3:], part.images, atol=1e-12)
    other = square(Problem(embed, towards(target[3:]), ball, Budget(40), KEY), x[3:])
    assert not torch.allclose(part.images, other.images)


def test_units_that_met_their_goal_ask_no_more() -> None:
    x = pictures(4)
    ended = Objective(lambda e, positions: e[:, 0, 0].clamp(max=-10.0), top=-10.0)
    assert square(Problem(lambda i: i.flatten(1), ended, Ball(0.5, "l2"), Budget(20), KEY), x).queries == 4


@pytest.mark.medium
@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("method", ["square", "nes"])
def test_every_goal_is_climbed_in_l2(name: str, method: str) -> None:
    from anchorhold.perturb.methods import METHODS

    there, goal = world(), goal_named(name, "corrected")
    scene: Scene = there.scene
    ids = torch.arange(0, 40, 4)
    done = attack(
        there.embed, there.side(goal.side)[ids], scene, goal, ids, Ball(0.4, "l2"), Budget(80), Key.of(1), 5,
        method=METHODS[method],
    )  # fmt: skip
    objective = goal.objective(scene, ids, done.targets)
    aimed = torch.ones(len(ids), dtype=torch.bool)
    if done.targets is not None:
        aimed = (done.targets.reshape(len(ids), -1) >= 0).all(1)
    before = objective.value(scene.clean(goal.side)[ids][:, None], torch.arange(len(ids)))
    after = objective.value(there.embed(done.images)[:, None], torch.arange(len(ids)))
    assert (after >= before - 1e-9).all() and (after > before)[aimed].any()
    assert length(done.images - there.side(goal.side)[ids]).max() <= 0.4 * (1 + 1e-9) and done.queries > 0
