"""APGD, Square and C&W: closed forms, and what they promise about balls, values and randomness."""

import math
from collections.abc import Callable
from dataclasses import fields
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from anchorhold.attacks.recall import Gallery, margin
from anchorhold.errors import DataError, SettingsError
from anchorhold.perturb.ascend import ascend
from anchorhold.perturb.ball import Ball
from anchorhold.perturb.cw import smallest_eps, smallest_l2
from anchorhold.perturb.methods import METHODS
from anchorhold.perturb.problem import Objective, Problem
from anchorhold.perturb.rules import moments
from anchorhold.perturb.settings import Budget
from anchorhold.perturb.square import share_of, square
from anchorhold.random import Key
from tests.analytic import draw, linear_embedder, tanh_embedder, towards

FREE = {"low": -1e9, "high": 1e9}
KEY = Key.of(7)
APGD = Budget(30, start="random", keep="best", rule="apgd")


def pictures(units: int, side: int = 3) -> Tensor:
    return KEY("pictures").uniform(torch.arange(units), (1, 1, side, side))


def reached(embed: object, images: Tensor, objective: Objective) -> Tensor:
    return objective.value(embed(images[:, 0])[:, None], torch.arange(len(images)))  # type: ignore[operator]


@pytest.mark.parametrize("wrong", [lambda x: 255 * x, lambda x: (x - 0.5) / 0.2, lambda x: x * torch.nan])
def test_images_beyond_their_range_are_refused_by_every_method(wrong: Callable[[Tensor], Tensor]) -> None:
    embed, _ = linear_embedder(9)
    x, problem = pictures(4), Problem(embed, towards(draw(4, 5)), Ball(0.1), Budget(2), KEY)
    for find in METHODS.values():
        find(problem, x + 1e-6)  # as far as resizing rounds
        with pytest.raises(DataError, match="hold pixels from"):
            find(problem, wrong(x))
    with pytest.raises(DataError, match="hold pixels from"):
        smallest_l2(embed, wrong(x[:, 0]), lambda e, _: e[:, 0, 0], steps=2, searches=1)


# APGD --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("start", ["zero", "random"])
def test_apgd_is_nowhere_below_pgd_on_the_linear_closed_form(norm: str, start: str) -> None:
    embed, weight = linear_embedder(9)
    x, goal, eps = pictures(8), towards(draw(8, 5)), 0.1
    ball = Ball(eps, norm, **FREE)  # type: ignore[arg-type]
    plain = ascend(Problem(embed, goal, ball, Budget(30, eps / 4, start=start), KEY), x)  # type: ignore[arg-type]
    adaptive = ascend(Problem(embed, goal, ball, Budget(30, start=start, keep="best", rule="apgd"), KEY), x)  # type: ignore[arg-type]
    best = reached(embed, x, goal) + eps * (draw(8, 5) @ weight).norm(p=1 if norm == "linf" else 2, dim=1)
    assert (reached(embed, adaptive.images, goal) >= reached(embed, plain.images, goal) - 1e-9).all()
    assert torch.allclose(reached(embed, adaptive.images, goal), best, rtol=1e-6)
    assert torch.allclose(adaptive.value, reached(embed, adaptive.images, goal))  # type: ignore[arg-type]


def test_apgd_finds_the_top_that_a_fixed_step_walks_around() -> None:
    """e(x) = −|x − peak|²: a step of ε never ends on a peak inside the ball, a halved one does."""
    x = torch.full((5, 1, 1, 2, 2), 0.5, dtype=torch.float64)
    peak = x[:, 0] + 0.05 * draw(5, 1, 2, 2, name="peak").clamp(-1, 1)
    goal = Objective(lambda e, positions: -(e[:, 0] - peak.flatten(1)[positions]).square().sum(1))

    def embed(images: Tensor) -> Tensor:
        return images.flatten(1)

    fixed = ascend(Problem(embed, goal, Ball(0.1), Budget(60, 0.1, keep="best")), x)
    adaptive = ascend(Problem(embed, goal, Ball(0.1), Budget(60, keep="best", rule="apgd")), x)
    assert (reached(embed, adaptive.images, goal) >= reached(embed, fixed.images, goal)).all()
    assert reached(embed, adaptive.images, goal).min() > -1e-4 > reached(embed, fixed.images, goal).mean()


def slow_apgd(value: Callable[[Tensor], Tensor], origin: Tensor, ball: Ball, steps: int) -> Tensor:
    """One unit, from its clean image."""

    def look(x: Tensor) -> tuple[float, Tensor]:
        x = x.clone().requires_grad_()
        height = value(x)
        return height.item(), torch.autograd.grad(height, x)[0]

    x = before = best_x = origin
    height, gradient = look(x)
    best, best_gradient = height, gradient
    eta, rises, last, kept, then = 2 * ball.eps, 0, 0, False, -math.inf
    for step in range(steps):
        if step:
            now, gradient = look(x)
            rises += now > height
            height = now
            if now > best:
                best, best_x, best_gradient = now, x, gradient
        if step in moments(steps):
            halve = rises < 0.75 * (step - last) or (kept and best <= then)
            kept, then, rises, last = not halve, best, 0, step
            if halve:
                eta, x, gradient = eta / 2, best_x, best_gradient
        weight = 0.75 if step else 1.0
        z = ball.project(ball.step(x, gradient, eta), origin)
        x, before = ball.project(x + weight * (z - x) + (1 - weight) * (x - before), origin), x
    return x if look(x)[0] > best else best_x


@pytest.mark.medium
@pytest.mark.parametrize(("norm", "waves"), [("linf", 20), ("linf", 60), ("l2", 60)])
def test_apgd_takes_the_steps_of_a_plain_loop(norm: str, waves: int) -> None:
    x, ball = torch.full((16, 1, 1, 3, 3), 0.5, dtype=torch.float64), Ball(0.15, norm)  # type: ignore[arg-type]
    peak = 0.5 + 0.2 * draw(16, 9, name="peak")

    def value(e: Tensor, positions: Tensor) -> Tensor:
        hill = -(e[:, 0] - peak[positions]).square().sum(1)
        return hill + 0.02 * torch.sin(waves * e[:, 0]).sum(1)

    found = ascend(
        Problem(lambda images: images.flatten(1), Objective(value), ball, Budget(60, keep="best", rule="apgd")), x
    )
    for i in range(16):
        slow = slow_apgd(lambda z, i=i: value(z.flatten(2), torch.tensor([i]))[0], x[i : i + 1], ball, 60)
        assert torch.allclose(found.images[i : i + 1], slow, rtol=0, atol=1e-6)  # a flat top: its best is rounding


def test_apgd_keeps_its_step_where_three_quarters_rise_and_halves_it_below() -> None:
    """Heights by script, and a slope that turns: 12 of the 16 steps before the third moment rise, then 11."""
    x, ball = torch.full((1, 1, 1, 1, 2), 0.5, dtype=torch.float64), Ball(0.1, **FREE)  # type: ignore[arg-type]
    ends = []
    for falls in ({43, 46, 49, 52}, {43, 45, 47, 49, 52}):

        def scripted(falls: set[int] = falls) -> Callable[[Tensor, Tensor], Tensor]:
            heights = accumulate(-1.0 if step in falls else 2.0 for step in range(101))
            looks = enumerate(heights)

            def value(e: Tensor, _: Tensor) -> Tensor:
                step, height = next(looks)
                return (-1) ** (step // 2) * (e - e.detach()).sum((1, 2)) + height

            return value

        budget, slow = Budget(100, keep="best", rule="apgd"), scripted()
        found = ascend(Problem(lambda images: images.flatten(1), Objective(scripted()), ball, budget), x).images
        wanted = slow_apgd(lambda z: slow(z.flatten(2), torch.zeros(1))[0], x, ball, 100)  # noqa: B023
        assert torch.allclose(found, wanted, rtol=0, atol=1e-12)
        ends.append(found)
    assert not torch.allclose(*ends, atol=1e-3)


def test_apgd_keeps_an_iterate_that_met_the_goal_over_a_higher_one() -> None:
    x = torch.full((4, 1, 1, 1, 1), 0.5, dtype=torch.float64)
    beyond = lambda e, positions: e[:, 0, 0] > 0.55  # noqa: E731
    falling = Objective(lambda e, positions: e[:, 0, 0] - 1.0 * beyond(e.detach(), positions), beyond)
    found = ascend(
        Problem(lambda images: images.flatten(1), falling, Ball(0.1), Budget(9, keep="best", rule="apgd")), x
    )
    assert (found.images > 0.55).all()


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_apgd_stays_in_ball_and_range_whatever_the_batch(norm: str) -> None:
    x, goal, ball = pictures(6).round(decimals=1), towards(draw(6, 6)), Ball(0.2, norm)  # type: ignore[arg-type]
    whole = ascend(Problem(tanh_embedder(9), goal, ball, APGD, KEY), x)
    parts = ascend(Problem(tanh_embedder(9), goal, ball, APGD, KEY), x, batch=2)
    shift = (whole.images - x).flatten(2)
    assert (shift.abs().amax() if norm == "linf" else shift.norm(dim=2).amax()) <= 0.2 * (1 + 1e-12)
    assert whole.images.min() >= 0 and whole.images.max() <= 1
    assert torch.allclose(whole.images, parts.images, atol=1e-9) and whole.image_steps == parts.image_steps == 6 * 30


def test_apgd_is_no_worse_than_pgd_on_a_net_with_margins() -> None:
    embed, x = tanh_embedder(9), pictures(24)
    gallery = Gallery(embed(x[:, 0]), torch.arange(24) % 3)
    goal = margin(gallery, gallery.labels, torch.arange(24))
    plain = ascend(Problem(embed, goal, Ball(0.05), Budget(30, 0.0125), KEY), x)
    adaptive = ascend(Problem(embed, goal, Ball(0.05), APGD, KEY), x)
    assert reached(embed, adaptive.images, goal).mean() >= reached(embed, plain.images, goal).mean()
    won = reached(embed, adaptive.images, goal) > 0
    assert won.any() and adaptive.image_steps < 24 * 30  # finished units were dropped


def test_apgd_says_what_it_cannot_do() -> None:
    with pytest.raises(SettingsError, match="keep = best"):
        Budget(5, rule="apgd")
    stationary = Objective(lambda e, _: e[:, 0].square().sum(1), first=lambda e, _: e[:, 0].sum(1))
    with pytest.raises(SettingsError, match="use a random start"):
        ascend(Problem(tanh_embedder(9), stationary, Ball(0.1), Budget(5, keep="best", rule="apgd")), pictures(2))


def test_a_given_start_is_where_the_first_step_is_made_from() -> None:
    x = pictures(3)
    starts = (x + 0.3).clamp(max=1)
    none = ascend(Problem(tanh_embedder(9), towards(draw(3, 6)), Ball(0.1), Budget(0)), x, starts=starts)
    assert torch.allclose(none.images, torch.minimum(starts, x + 0.1))


# Square ------------------------------------------------------------------------------------------------------


def rounded(x: Tensor) -> Tensor:
    """No gradient anywhere."""
    return tanh_embedder(9)((x * 4).round() / 4)


def test_square_climbs_where_there_is_no_gradient() -> None:
    x, goal, ball = pictures(8), towards(draw(8, 6)), Ball(0.2)
    blind = ascend(
        Problem(lambda i: rounded(i) + 0 * i.flatten(1).sum(1, keepdim=True), goal, ball, Budget(30, 0.05)), x
    )
    found = square(Problem(rounded, goal, ball, Budget(200), KEY), x)
    assert torch.equal(blind.images, x)
    assert (reached(rounded, found.images, goal) >= reached(rounded, x, goal)).all()
    assert (reached(rounded, found.images, goal) > reached(rounded, x, goal)).sum() >= 6
    assert torch.allclose(found.value, reached(rounded, found.images, goal))  # type: ignore[arg-type]
    assert found.image_steps == 0 and found.queries == 8 * 201
    assert (found.images - x).abs().max() <= 0.2 * (1 + 1e-12) and found.images.min() >= 0 and found.images.max() <= 1


@pytest.mark.medium
def test_square_is_near_the_linear_closed_form() -> None:
    embed, weight = linear_embedder(9)
    x, target = pictures(6), draw(6, 5)
    found = square(Problem(embed, towards(target), Ball(0.1, **FREE), Budget(2000), KEY), x)
    gain = ((embed(found.images[:, 0]) - embed(x[:, 0])) * target).sum(1)
    assert (gain >= 0.95 * 0.1 * (target @ weight).norm(p=1, dim=1)).all()


def test_square_depends_on_ids_and_not_on_the_batch() -> None:
    x, target = pictures(6), draw(6, 6)
    whole = square(Problem(rounded, towards(target), Ball(0.2), Budget(40), KEY), x)
    part = square(Problem(rounded, towards(target[3:]), Ball(0.2), Budget(40), KEY), x[3:], ids=torch.arange(3, 6))
    assert torch.equal(whole.images[3:], part.images)
    other = square(Problem(rounded, towards(target[3:]), Ball(0.2), Budget(40), KEY), x[3:])
    assert not torch.equal(part.images, other.images)


def test_square_stops_asking_for_whom_it_has_beaten() -> None:
    always = Objective(lambda e, p: e[:, 0].sum(1), lambda e, p: p % 2 == 0)
    found = square(Problem(tanh_embedder(9), always, Ball(0.1), Budget(10), KEY), pictures(4))
    assert found.queries == 4 + 2 * 10 and torch.equal(found.images[::2], pictures(4)[::2])


def test_square_stops_at_the_top_of_an_objective() -> None:
    x = pictures(4)
    endless = Objective(lambda e, positions: e[:, 0, 0])
    ended = Objective(lambda e, positions: e[:, 0, 0].clamp(max=-10.0), top=-10.0)  # met by all of them at once
    asked = [
        square(Problem(lambda i: i.flatten(1), o, Ball(0.1), Budget(20), Key.of(0)), x).queries
        for o in (endless, ended)
    ]
    assert asked == [4 * 21, 4]


def test_square_keeps_what_met_the_goal_over_what_is_higher() -> None:
    x = torch.full((8, 1, 1, 2, 2), 0.5, dtype=torch.float64)
    brighter = Objective(
        lambda e, positions: -(e[:, 0] - 0.5).abs().sum(1), lambda e, positions: e[:, 0].mean(1) > 0.52
    )
    found = square(Problem(lambda images: images.flatten(1), brighter, Ball(0.1), Budget(200), KEY), x)
    assert (found.images.flatten(1).mean(1) > 0.52).all()


def test_squares_shrink() -> None:
    shares = [share_of(query, 1000) for query in range(1000)]
    assert shares == sorted(shares, reverse=True) and shares[0] == 0.8 and shares[-1] == 0.8 / 2**8
    assert [shares[query] for query in (1, 2, 5, 6)] == [0.8, 0.4, 0.4, 0.2]  # after 0.1 and 0.5 %, not with them


def test_square_says_what_it_cannot_do() -> None:
    with pytest.raises(SettingsError, match="need a key"):
        square(Problem(rounded, towards(draw(2, 6)), Ball(0.1), Budget(2)), pictures(2))


# C&W ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
def test_cw_moves_black_and_white_pixels_too(share: float) -> None:
    """A linear goal: each pixel goes ε towards its sign, or stays where that leads out of [0, 1]."""
    embed, weight = linear_embedder(64)
    x = 0.1 + 0.8 * pictures(6, 8)
    ends = KEY("ends").uniform(torch.arange(6), (1, 1, 8, 8))
    x = torch.where(ends < share / 2, 0.0, torch.where(ends > 1 - share / 2, 1.0, x))
    goal, eps = towards(draw(6, 5)), 8 / 255
    found = METHODS["cw"](Problem(embed, goal, Ball(eps), Budget(50), KEY), x)
    best = (x + eps * (draw(6, 5) @ weight).reshape(6, 1, 1, 8, 8).sign()).clamp(0, 1)
    before, now, most = (reached(embed, each, goal) for each in (x, found.images, best))
    assert ((now - before) / (most - before)).min() > 0.9


@pytest.mark.medium
def test_cw_finds_the_smallest_l2_norm_of_a_linear_two_class_case() -> None:
    """Two prototypes p, n and e(x) = W x: |Wx − p| > |Wx − n| beyond the hyperplane 2⟨n − p, Wx⟩ = |n|² − |p|²."""
    embed, weight = linear_embedder(9)
    x = 0.4 + 0.2 * pictures(10)
    near = embed(x[:, 0])
    p, n = near.mean(0) + 0.3 * draw(1, 5, name="p")[0], near.mean(0) - 0.3 * draw(1, 5, name="p")[0]
    normal = 2 * weight.T @ (n - p)

    def height(images: Tensor) -> Tensor:
        return images.flatten(1) @ normal - (n.square().sum() - p.square().sum())

    asked = x[height(x[:, 0]) < 0]
    smallest = -height(asked[:, 0]) / normal.norm()
    assert len(asked) >= 3 and smallest.max() < 0.3  # so that [0, 1] does not bind

    def excess(e: Tensor, positions: Tensor) -> Tensor:
        return (e[:, 0] - p).norm(dim=1) - (e[:, 0] - n).norm(dim=1)

    found, norms = smallest_l2(embed, asked[:, 0], excess, steps=300)
    assert (excess(embed(found)[:, None], torch.arange(len(found))) > 0).all()
    assert torch.allclose((found - asked[:, 0]).flatten(1).norm(dim=1), norms)
    assert (norms >= smallest * (1 - 1e-6)).all() and (norms <= 1.05 * smallest).all()


def test_cw_says_where_there_is_nothing_to_find() -> None:
    _, norms = smallest_l2(tanh_embedder(9), pictures(2)[:, 0], lambda e, p: -1 - e[:, 0].square().sum(1), steps=3)
    assert norms.isinf().all()


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_cw_in_a_ball_is_near_the_linear_closed_form_and_stays_inside(norm: str) -> None:
    embed, weight = linear_embedder(9)
    x, target, eps = 0.4 + 0.2 * pictures(6), draw(6, 5), 0.05
    found = METHODS["cw"](Problem(embed, towards(target), Ball(eps, norm), Budget(50)), x)  # type: ignore[arg-type]
    shift = (found.images - x).flatten(2)
    assert (shift.abs().amax() if norm == "linf" else shift.norm(dim=2).amax()) <= eps * (1 + 1e-9)
    gain = ((embed(found.images[:, 0]) - embed(x[:, 0])) * target).sum(1)
    best = eps * (target @ weight).norm(p=1 if norm == "linf" else 2, dim=1)
    assert (gain >= (0.95 if norm == "linf" else 0.85) * best).all() and (gain <= best * (1 + 1e-9)).all()


def test_the_smallest_eps_is_found_by_bisection() -> None:
    true = torch.tensor([0.0, 0.01, 0.07, 0.19, 0.5], dtype=torch.float64)
    asked: list[int] = []

    def succeeds(eps: float, which: Tensor) -> Tensor:
        asked.append(len(which))
        return true[which] <= eps

    found = smallest_eps(succeeds, 5, highest=0.2, searches=8)
    assert found[0] == 0 and found[4].isinf()
    assert ((found[1:4] >= true[1:4]) & (found[1:4] <= true[1:4] + 0.2 / 256)).all()
    assert sum(asked) <= 5 + 4 + 3 * 8  # who is done is not asked again


# All of them -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_with_an_objective_of_ones_own(name: str) -> None:
    x, mine = pictures(4), Objective(lambda e, positions: e[:, 0, 0])
    found = METHODS[name](
        Problem(tanh_embedder(9), mine, Ball(0.1), Budget(40), KEY), x, ids=torch.arange(4), embedded=None
    )
    assert (reached(tanh_embedder(9), found.images, mine) > reached(tanh_embedder(9), x, mine)).all()


SET = {
    "alpha": 0.02,
    "start": "random",
    "restarts": 2,
    "keep": "best",
    "schedule": "linear",
    "drop": False,
    "rule": "apgd",
}
READ = {
    "pgd": {*SET} - {"rule"},
    "apgd": {"start", "restarts", "keep", "drop", "rule"},
    "cw": {"start", "keep"},
    "square": {"keep"},
    "nes": {"keep"},
}


def test_every_setting_of_a_budget_is_in_the_table() -> None:
    assert {each.name for each in fields(Budget)} == {*SET, "steps"}
    assert READ.keys() == METHODS.keys()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("setting", SET)
def test_a_method_reads_every_setting_of_its_budget_or_refuses_it(name: str, setting: str) -> None:
    """What is read changes what is found, but for `drop`, `keep` and `rule` where a method has no other."""
    embed, x = tanh_embedder(9), pictures(4)
    # A goal that some reach soon, so that `drop` shows in the work; hills and valleys, so that `best` is not the last.
    hills = Objective(lambda e, _: torch.sin(40 * e[:, 0]).sum(1), done=lambda e, at: (at == 0) & (e[:, 0, 0] < 9))

    def found(budget: Budget) -> tuple[Tensor, int]:
        got = METHODS[name](Problem(embed, hills, Ball(0.1), budget, KEY), x)
        return got.images, got.image_steps

    plain, work = found(Budget(6))
    if setting == "rule" and name in ("pgd", "apgd"):
        rule = Budget(6, rule="apgd", keep="best")
        assert torch.equal(found(rule)[0], METHODS["apgd"](Problem(embed, hills, Ball(0.1), Budget(6), KEY), x).images)
    elif setting not in READ[name]:
        with pytest.raises(SettingsError, match=f"does not use {setting}|start out"):
            found(Budget(6, **{"keep": "best", setting: SET[setting]}))  # type: ignore[arg-type]
    elif setting == "keep" and name != "pgd":
        assert torch.equal(found(Budget(6, keep="best"))[0], plain)
    elif setting == "drop":
        images, more = found(Budget(6, drop=False))
        assert torch.equal(images[1:], plain[1:]) and more > work
    else:
        assert not torch.equal(found(Budget(6, **{setting: SET[setting]}))[0], plain)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", METHODS)
def test_a_watcher_is_shown_every_step_or_refused(name: str) -> None:
    seen: list[int] = []
    x, goal = pictures(4), towards(draw(4, 5))

    def climb() -> object:
        embed, _ = linear_embedder(9)
        return METHODS[name](
            Problem(embed, goal, Ball(0.1), Budget(5), KEY), x, watch=lambda step, *_: seen.append(step)
        )

    if name == "pgd":
        climb()
        assert seen == [0, 1, 2, 3, 4]
    else:
        with pytest.raises(SettingsError, match="best iterate"):
            climb()


@pytest.mark.parametrize("keep", ["last", "best"])
@pytest.mark.parametrize("name", METHODS)
def test_units_whose_known_embeddings_are_done_never_enter(name: str, keep: str) -> None:
    """The embeddings that are given decide, so half of them are told to lie at the goal."""
    asked: list[int] = []
    plain, _ = linear_embedder(9)
    x, direction = pictures(6), draw(6, 5)

    def embed(images: Tensor) -> Tensor:
        asked.append(len(images))
        return plain(images)

    goal = Objective(lambda e, at: (e[:, 0] * direction[at]).sum(1).clamp(max=50.0), top=50.0)
    known = plain(x[:, 0])[:, None]
    known[::2] = 1e3 * direction[::2, None]
    found = METHODS[name](Problem(embed, goal, Ball(0.1), Budget(40, keep=keep), KEY), x, embedded=known)  # type: ignore[arg-type]
    moved = (found.images != x).flatten(1).any(1)
    assert moved.tolist() == [False, True] * 3
    if found.value is not None:
        assert (found.value[::2] == 50).all() and (found.value[1::2] < 50).all()
    assert name == "cw" or max(asked) == 3  # C&W computes all units until the last is done


@pytest.mark.parametrize("name", METHODS)
def test_key_ids_and_starts_are_read_by_every_method(name: str) -> None:
    embed, x = tanh_embedder(9), pictures(4)
    random = {} if name in ("square", "nes") else {"start": "random"}
    hills = Objective(lambda e, _: torch.sin(40 * e[:, 0]).sum(1))

    def found(budget: Budget, **more: object) -> Tensor:
        problem = Problem(embed, hills, Ball(0.1), budget, more.pop("key", KEY))  # type: ignore[arg-type]
        return METHODS[name](problem, x, **more).images  # type: ignore[arg-type]

    budget = Budget(4, **random)  # type: ignore[arg-type]
    plain = found(budget)
    assert not torch.equal(found(budget, key=KEY("other")), plain)
    assert not torch.equal(found(budget, ids=torch.arange(4) + 9), plain)
    assert torch.equal(found(budget, ids=torch.arange(4)), plain)
    starts = (x + 0.3).clamp(0, 1)  # beyond the ball: they are brought into it
    assert not torch.equal(found(Budget(1), starts=starts), found(Budget(1)))
    assert (found(Budget(1), starts=starts) - x).abs().max() <= 0.1 + 1e-9
    for wrong in ({"ids": torch.arange(3)}, {"starts": starts[:3]}, {"embedded": torch.zeros(4, 5)}):
        with pytest.raises(SettingsError, match="shape"):
            found(Budget(1), **wrong)


@pytest.mark.parametrize("name", ["apgd", "cw", "square", "nes"])
def test_a_coupled_objective_is_refused_by_methods_that_compare_units(name: str) -> None:
    coupled = Objective(lambda e, _: e.sum(), coupled=True)
    with pytest.raises(SettingsError, match="coupled"):
        METHODS[name](Problem(tanh_embedder(9), coupled, Ball(0.1), Budget(4), KEY), pictures(4))
