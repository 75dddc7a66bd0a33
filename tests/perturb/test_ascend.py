"""The ascent: closed forms, invariances, and what it must leave alone."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from anchorhold.defences.hardness import raise_hardness
from anchorhold.defences.settings import HardnessSettings
from anchorhold.errors import DataError, SettingsError
from anchorhold.model.frozen import frozen
from anchorhold.perturb.ascend import ascend
from anchorhold.perturb.ball import Ball
from anchorhold.perturb.problem import Objective, Problem
from anchorhold.perturb.settings import Budget
from anchorhold.random import Key
from anchorhold.triplets import hardness
from tests.analytic import draw, linear_embedder, tanh_embedder, towards

FREE = {"low": -1e9, "high": 1e9}  # no range of pixels: closed forms then hold exactly
KEY = Key.of(7)


def pictures(units: int, views: int = 1, side: int = 3) -> Tensor:
    return KEY("pictures").uniform(torch.arange(units), (views, 1, side, side))


def test_an_epsilon_in_levels_is_refused_where_it_is_given() -> None:
    for make in (Ball, lambda eps: HardnessSettings(eps=eps)):
        with pytest.raises(SettingsError, match=r"ε = 8 is more than a pixel can change, from 0 to 1; .* 8/255"):
            make(8.0)
        make(1.0)
    assert Ball(8.0, "l2").eps == Ball(8.0, low=0, high=255).eps == 8  # lengths of whole images; images in levels


# Closed forms ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("norm", "order"), [("linf", 1), ("l2", 2)])
@pytest.mark.parametrize("start", ["zero", "random"])
def test_reaches_the_closed_form_on_a_linear_embedder(norm: str, order: int, start: str) -> None:
    embed, weight = linear_embedder(9)
    x, target, eps = pictures(4), draw(4, 5), 0.1
    found = ascend(Problem(embed, towards(target), Ball(eps, norm, **FREE), Budget(40, eps / 4, start=start), KEY), x)
    gain = ((embed(found.images[:, 0]) - embed(x[:, 0])) * target).sum(1)
    best = eps * (target @ weight).norm(p=order, dim=1)
    assert torch.allclose(gain, best, rtol=1e-9 if norm == "linf" else 1e-4)


def test_one_step_of_length_eps_is_fgsm() -> None:
    embed, weight = linear_embedder(9)
    x, target = pictures(3), draw(3, 5)
    found = ascend(Problem(embed, towards(target), Ball(0.1, **FREE), Budget(1, 0.1)), x)
    assert torch.allclose(found.images[:, 0].flatten(1) - x[:, 0].flatten(1), 0.1 * (target @ weight).sign())


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("start", ["zero", "random"])
def test_stays_in_ball_and_range(norm: str, start: str) -> None:
    x, eps = pictures(6).round(decimals=1), 0.2  # many pixels lie on the edge of the range
    found = ascend(Problem(tanh_embedder(9), towards(draw(6, 6)), Ball(eps, norm), Budget(9, 0.1, start=start), KEY), x)
    shift = (found.images - x).flatten(2)
    size = shift.abs().amax(2) if norm == "linf" else shift.norm(dim=2)
    assert size.max() <= eps * (1 + 1e-15)
    assert found.images.min() >= 0 and found.images.max() <= 1
    assert size.min() > 0


def test_eps_zero_and_no_steps_change_nothing() -> None:
    x = pictures(3)
    for ball, budget in [
        (Ball(0.0), Budget(5)),
        (Ball(0.1), Budget(0)),
        (Ball(0.0, "l2"), Budget(5)),
        (Ball(0.0), Budget(0, restarts=2)),
    ]:
        assert torch.equal(ascend(Problem(tanh_embedder(9), towards(draw(3, 6)), ball, budget, KEY), x).images, x)


def test_random_l2_starts_are_uniform_by_volume() -> None:
    """The share of the ball's volume within a uniform point's radius is uniform in [0, 1]."""
    x, eps = pictures(4000), 0.3
    radius = (Ball(eps, "l2", **FREE).start(x, KEY, torch.arange(4000)) - x).flatten(1).norm(dim=1)
    share = (radius / eps).pow(9)
    assert abs(share.mean() - 1 / 2) < 0.02 and abs(share.square().mean() - 1 / 3) < 0.02


# Units that are done leave, batches of any size -------------------------------------------------------------


def hm(units: int = 12) -> tuple[Tensor, Objective]:
    return pictures(units, views=3), raise_hardness(torch.linspace(-0.3, 0.6, units, dtype=torch.float64))


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_dropping_units_changes_nothing(norm: str) -> None:
    x, goal = hm()
    embed = tanh_embedder(9)
    with_all = ascend(Problem(embed, goal, Ball(0.2, norm), Budget(12, 0.03, drop=False)), x)
    dropped = ascend(Problem(embed, goal, Ball(0.2, norm), Budget(12, 0.03)), x)
    assert (with_all.images - dropped.images).abs().max() * 255 <= 1e-6
    assert dropped.image_steps < with_all.image_steps  # and some did leave
    assert with_all.active == dropped.active and 12 > dropped.active[0] > dropped.active[-1]
    after = hardness(*embed(dropped.images.flatten(0, 1)).unflatten(0, (-1, 3)).unbind(1))
    before = hardness(*embed(x.flatten(0, 1)).unflatten(0, (-1, 3)).unbind(1))
    assert (after >= before).all() and (after > before).any()


def test_units_known_to_be_done_never_enter_the_loop() -> None:
    x, goal = hm()
    embed, ball, budget = tanh_embedder(9), Ball(0.2), Budget(5, 0.03)
    unknown = ascend(Problem(embed, goal, ball, budget), x)
    known = ascend(
        Problem(embed, goal, ball, budget), x, embedded=embed(x.flatten(0, 1)).unflatten(0, (-1, 3)), batch=5
    )
    assert torch.equal(known.images, unknown.images) and known.active == unknown.active
    assert known.image_steps < unknown.image_steps


def test_units_known_to_be_done_are_measured_where_iterates_are_compared() -> None:
    x, goal = hm()
    embed, ball, budget = tanh_embedder(9), Ball(0.2), Budget(5, 0.03, keep="best")
    embedded = embed(x.flatten(0, 1)).unflatten(0, (-1, 3))
    assert goal.goal is not None and goal.goal(embedded, torch.arange(12)).any()
    found = ascend(Problem(embed, goal, ball, budget), x, embedded=embedded)
    assert found.value is not None and found.value.isfinite().all()


@pytest.mark.parametrize("batch", [1, 5, 12])
def test_batch_size_changes_nothing(batch: int) -> None:
    x, goal = hm()
    budget = Budget(6, 0.03, start="random", restarts=2, keep="best")
    whole = ascend(Problem(tanh_embedder(9), goal, Ball(0.2), budget, KEY), x)
    parts = ascend(Problem(tanh_embedder(9), goal, Ball(0.2), budget, KEY), x, batch=batch)
    assert (whole.images - parts.images).abs().max() * 255 <= 1e-6
    assert whole.image_steps == parts.image_steps and whole.active == parts.active


def test_order_changes_nothing_when_ids_go_along() -> None:
    x, order, target = pictures(6), torch.tensor([3, 1, 5, 0, 2, 4]), draw(6, 6)
    budget = Budget(4, 0.05, start="random")
    plain = ascend(Problem(tanh_embedder(9), towards(target), Ball(0.2), budget, KEY), x).images
    turned = ascend(
        Problem(tanh_embedder(9), towards(target[order]), Ball(0.2), budget, KEY), x[order], ids=order
    ).images
    assert torch.allclose(plain[order], turned, atol=1e-12)


def test_nothing_to_attack() -> None:
    found = ascend(Problem(tanh_embedder(9), towards(draw(1, 6)), Ball(0.1), Budget(3)), pictures(0))
    assert found.images.shape == (0, 1, 1, 3, 3) and found.image_steps == 0


# Views, starts, iterates ------------------------------------------------------------------------------------


def test_views_that_do_not_move_stay_and_count_for_nothing() -> None:
    x, goal = hm()
    found = ascend(
        Problem(tanh_embedder(9), goal, Ball(0.2), Budget(3, 0.03, drop=False), moves=(False, True, False)), x
    )
    assert torch.equal(found.images[:, [0, 2]], x[:, [0, 2]])
    assert not torch.equal(found.images[:, 1], x[:, 1])
    assert found.image_steps == 3 * 12


def test_resting_views_are_seen_by_the_objective_in_their_place() -> None:
    embed, x = tanh_embedder(9), pictures(2, views=3)
    seen: list[Tensor] = []

    def value(e: Tensor, positions: Tensor) -> Tensor:
        seen.append(e.detach())
        return e[:, 1, 0]

    ascend(Problem(embed, Objective(value), Ball(0.1), Budget(1), moves=(False, True, False)), x)
    assert torch.allclose(seen[0], embed(x.flatten(0, 1)).unflatten(0, (2, 3)))


def test_best_iterate_is_never_below_the_last_and_restarts_never_hurt() -> None:
    embed, x, target = tanh_embedder(9), pictures(8), draw(8, 6)
    goal, long_steps = towards(target), 0.15  # long steps overshoot, so that last and best differ

    def reached(budget: Budget) -> Tensor:
        return goal.value(
            embed(ascend(Problem(embed, goal, Ball(0.2), budget, KEY), x).images[:, 0])[:, None], torch.arange(8)
        )

    last = reached(Budget(7, long_steps))
    best = reached(Budget(7, long_steps, keep="best"))
    more = reached(Budget(7, long_steps, keep="best", restarts=4))
    assert (best >= last - 1e-12).all() and (best > last + 1e-9).any()
    assert (more >= best - 1e-12).all() and (more > best + 1e-9).any()


def test_reported_value_is_that_of_the_returned_images() -> None:
    embed, x, target = tanh_embedder(9), pictures(8), draw(8, 6)
    for budget in (
        Budget(5, 0.1, keep="best"),
        Budget(5, 0.1, restarts=3),
        Budget(5, 0.1, restarts=2, keep="best"),
        Budget(0, restarts=3),
        Budget(0, keep="best"),
    ):
        for first in (None, lambda e, positions: 100 + e[:, 0].sum(1)):  # which is climbed and never reported
            found = ascend(Problem(embed, replace(towards(target), first=first), Ball(0.2), budget, KEY), x)
            value = (embed(found.images[:, 0]) * target).sum(1)
            assert found.value is not None and torch.allclose(found.value, value, atol=1e-12)
            over = replace(towards(target), first=first, done=lambda e, positions: e[:, 0, 0] > -2)  # all, at once
            found = ascend(Problem(embed, over, Ball(0.2), budget, KEY), x)
            assert found.value is not None and found.value.isfinite().all()


def test_restarts_are_for_survivors_only() -> None:
    x, goal = hm()
    embed = tanh_embedder(9)
    once = ascend(Problem(embed, goal, Ball(0.2), Budget(6, 0.03)), x)
    twice = ascend(Problem(embed, goal, Ball(0.2), Budget(6, 0.03, restarts=2), KEY), x)
    positions = torch.arange(12)

    def met(images: Tensor) -> Tensor:
        assert goal.goal is not None
        return goal.goal(embed(images.flatten(0, 1)).unflatten(0, (-1, 3)), positions)

    kept = met(once.images)
    assert kept.any() and not kept.all()
    assert torch.equal(twice.images[kept], once.images[kept])
    assert met(twice.images)[kept].all()


def test_a_restart_that_met_the_goal_replaces_what_was_higher() -> None:
    x = torch.full((64, 1, 1, 1, 1), 0.5, dtype=torch.float64)
    low = Objective(lambda e, positions: e[:, 0, 0], lambda e, positions: e[:, 0, 0] < 0.45)  # a quarter of the ball
    budget = Budget(1, 0.0, start="random", restarts=6)
    found = ascend(Problem(lambda images: images.flatten(1), low, Ball(0.1), budget, KEY), x)
    assert (found.images < 0.45).double().mean() > 0.6  # of 1 − 0.75⁶ = 0.82


def test_a_stationary_objective_names_its_first_direction() -> None:
    embed, x = tanh_embedder(9), pictures(4)
    clean = embed(x[:, 0])

    def shift(e: Tensor, positions: Tensor) -> Tensor:
        return (e[:, 0] - clean[positions]).square().sum(1)

    stuck = ascend(Problem(embed, Objective(shift), Ball(0.1), Budget(5, 0.02)), x).images
    freed = ascend(
        Problem(embed, Objective(shift, first=lambda e, positions: e[:, 0].sum(1)), Ball(0.1), Budget(5, 0.02)), x
    )
    assert torch.equal(stuck, x)
    assert (embed(freed.images[:, 0]) - clean).norm(dim=1).min() > 0.01


def test_a_tiny_start_only_names_a_direction() -> None:
    embed, x = tanh_embedder(9), pictures(4)
    clean = embed(x[:, 0])
    away = Objective(lambda e, positions: (e[:, 0] - clean[positions]).square().sum(1))
    begun = ascend(Problem(embed, away, Ball(0.1), Budget(0, 0.02, start="tiny"), KEY), x).images - x
    assert 0 < begun.abs().max() <= 1e-4
    freed = ascend(Problem(embed, away, Ball(0.1), Budget(5, 0.02, start="tiny"), KEY), x)
    assert (embed(freed.images[:, 0]) - clean).norm(dim=1).min() > 0.01
    with pytest.raises(SettingsError, match="key"):
        ascend(Problem(embed, away, Ball(0.1), Budget(5, 0.02, start="tiny")), x)


def test_after_a_tiny_start_the_others_are_anywhere_in_the_ball() -> None:
    x, budget = pictures(8), Budget(1, 0.0, start="tiny", restarts=2)
    found = ascend(Problem(tanh_embedder(9), towards(draw(8, 6)), Ball(0.1), budget, KEY), x)
    assert (found.images - x).abs().max() > 0.05


@pytest.mark.parametrize("batch", [5, 12])
def test_a_watcher_is_shown_where_each_step_starts(batch: int) -> None:
    x, goal = hm()
    embed, ball = tanh_embedder(9), Ball(0.2)
    seen: dict[int, Tensor] = {}

    def watch(step: int, images: Tensor, positions: Tensor) -> None:
        seen.setdefault(step, torch.full_like(x, torch.nan))[positions] = images

    found = ascend(Problem(embed, goal, ball, Budget(5, 0.03)), x, watch=watch, batch=batch)
    assert torch.equal(found.images, ascend(Problem(embed, goal, ball, Budget(5, 0.03)), x, batch=batch).images)
    assert sorted(seen) == [0, 1, 2, 3, 4] and torch.equal(seen[0], x)
    for step in range(1, 5):
        there = ascend(Problem(embed, goal, ball, Budget(step, 0.03)), x, batch=batch).images
        shown = ~seen[step].isnan()
        assert torch.equal(seen[step][shown], there[shown]) and shown.any()
    assert seen[4].isnan().any()  # those who left are not shown again


def test_a_watcher_keeps_what_it_was_shown_of_a_single_step() -> None:
    seen: list[Tensor] = []
    embed, x = tanh_embedder(9), pictures(3)
    ascend(
        Problem(embed, towards(draw(3, 6)), Ball(0.2), Budget(1, 0.1)),
        x,
        watch=lambda step, images, at: seen.append(images),
    )
    assert torch.equal(seen[0], x)


def test_schedules_shorten_the_steps() -> None:
    assert [Budget(4, 1.0, schedule="linear").length(i) for i in range(4)] == [1, 0.75, 0.5, 0.25]
    cosine = [Budget(4, 1.0, schedule="cosine").length(i) for i in range(4)]
    assert cosine[0] == 1 and cosine[2] == pytest.approx(0.5) and cosine == sorted(cosine, reverse=True)
    embed, _ = linear_embedder(9)
    found = ascend(
        Problem(embed, towards(draw(1, 5)), Ball(9.0, **FREE), Budget(4, 1.0, schedule="linear")), pictures(1)
    )
    assert (found.images - pictures(1)).abs().max().item() == pytest.approx(2.5)


# What it must leave alone, and what it refuses --------------------------------------------------------------


def test_leaves_parameters_gradients_and_modes_untouched() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(9, 6), torch.nn.Dropout(0.5), torch.nn.Linear(6, 6))
    net.double().train()
    net[2].eval()
    net[1].weight.grad = torch.ones_like(net[1].weight)
    modes = [m.training for m in net.modules()]
    weights = [p.clone() for p in net.parameters()]
    with frozen(net) as embed:
        found = ascend(Problem(embed, towards(draw(3, 6)), Ball(0.1), Budget(3, 0.05)), pictures(3))
    assert not torch.equal(found.images, pictures(3))
    assert [m.training for m in net.modules()] == modes
    assert all(torch.equal(a, b) for a, b in zip(weights, net.parameters()))
    assert torch.equal(net[1].weight.grad, torch.ones_like(net[1].weight)) and net[3].weight.grad is None


def test_a_coupled_objective_sees_the_whole_batch() -> None:
    x = pictures(5)

    def spread(e: Tensor, positions: Tensor) -> Tensor:
        assert len(positions) == 5
        return e[:, 0].var(0).sum()

    embed = tanh_embedder(9)
    found = ascend(Problem(embed, Objective(spread, coupled=True), Ball(0.1), Budget(5, 0.02)), x)
    assert embed(found.images[:, 0]).var(0).sum() > embed(x[:, 0]).var(0).sum()


def test_a_coupled_objective_that_met_its_goal_ends_for_the_whole_batch() -> None:
    x, embed, far = pictures(5), tanh_embedder(9), 0.02

    def spread(e: Tensor, positions: Tensor) -> Tensor:
        return torch.relu(far - e[:, 0].var(0).sum()).neg()

    def wide(e: Tensor, positions: Tensor) -> Tensor:
        return e[:, 0].var(0).sum() >= far

    x = 0.5 + 0.05 * (x - 0.5)
    plain = ascend(Problem(embed, Objective(spread, coupled=True), Ball(0.4), Budget(40, 0.01)), x)
    ended = ascend(Problem(embed, Objective(spread, wide, coupled=True), Ball(0.4), Budget(40, 0.01)), x)
    assert torch.equal(plain.images, ended.images) and not torch.equal(plain.images, x)
    assert 0 < ended.image_steps < plain.image_steps == 200
    assert set(ended.active) == {0, 5} and ended.active == sorted(ended.active, reverse=True)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x, o: ascend(Problem(tanh_embedder(9), o, Ball(0.1), Budget(1)), x, batch=2), "whole batch"),
        (lambda x, o: ascend(Problem(tanh_embedder(9), o, Ball(0.1), Budget(1, keep="best")), x), "per unit"),
        (lambda x, o: ascend(Problem(tanh_embedder(9), o, Ball(0.1), Budget(1, start="random")), x), "key"),
        (lambda x, o: ascend(Problem(tanh_embedder(9), o, Ball(0.1), Budget(1), moves=(False,)), x), "move"),
        (lambda x, o: Ball(-1.0), "negative"),
        (lambda x, o: Ball("8/255"), "ε is a number such as 8 / 255, not '8/255'"),
        (lambda x, o: Budget(4, "1/255"), "alpha is a number such as 1 / 255, not '1/255'"),
        (lambda x, o: Ball(1.0, "l3"), "linf, l2"),
        (lambda x, o: Budget(restarts=0), "at least 1"),
        (lambda x, o: Budget(start="randm"), "start 'randm'; did you mean random"),
        (lambda x, o: Budget(keep="first"), "keep 'first'; "),
        (lambda x, o: Budget(schedule="cos"), "schedule 'cos'; did you mean cosine"),
        (
            lambda x, o: ascend(Problem(tanh_embedder(9), o, Ball(0.1), Budget(1)), x, ids=torch.arange(3)),
            "5 units but ids",
        ),
        (
            lambda x, o: ascend(Problem(tanh_embedder(9), Objective(o.value), Ball(0.1), Budget(1)), x),
            r"gave \(\) for 5 units; .*coupled=True",
        ),
        (
            lambda x, o: ascend(
                Problem(tanh_embedder(9), Objective(o.value, lambda e, at: at > 2, coupled=True), Ball(0.1), Budget(1)),
                x,
            ),
            "one boolean",
        ),
    ],
)
def test_refuses_what_makes_no_sense(call, words: str) -> None:  # type: ignore[no-untyped-def]
    coupled = Objective(lambda e, positions: e.sum(), coupled=True)
    with pytest.raises(SettingsError, match=words):
        call(pictures(5), coupled)


@pytest.mark.parametrize("spoil", [lambda x: 255 * x, lambda x: 2 * x - 1, lambda x: x * torch.nan])
def test_refuses_images_that_the_ball_would_clamp(spoil) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DataError, match=r"not in \[0, 1\]; bring them into that range"):
        ascend(Problem(tanh_embedder(9), towards(draw(5, 6)), Ball(0.1), Budget(1)), spoil(pictures(5)))
    nearly = pictures(5).clamp(min=1) + 1e-7  # what resizing rounds to
    assert ascend(Problem(tanh_embedder(9), towards(draw(5, 6)), Ball(0.1), Budget(1)), nearly).images.max() <= 1


def test_in_the_opening_step_who_is_done_is_judged_by_the_objective_itself() -> None:
    x = torch.full((2, 1, 1, 1, 1), 0.5, dtype=torch.float64)
    away = Objective(
        lambda e, _: -(0.1 - (e[:, 0, 0] - 0.5).abs()).clamp(min=0), first=lambda e, _: e[:, 0, 0] + 7, top=0.0
    )
    found = ascend(Problem(lambda images: images.flatten(1), away, Ball(0.2), Budget(8, 0.02)), x)
    assert torch.allclose(found.images, torch.tensor(0.6).double()) and found.active[:2] == [2, 2]


def test_an_objective_lets_go_of_its_tensors() -> None:
    constant = torch.zeros(3)
    seen = weakref.ref(constant)
    goal = Objective(lambda e, positions, constant=constant: (e[:, 0] - constant[positions, None]).sum(1), top=0.0)
    gc.disable()  # what only a collection would free stays for long: it does not know how much a GPU holds
    try:
        goal.met(torch.zeros(3, 1, 2), torch.arange(3))
        del goal, constant
        assert seen() is None
    finally:
        gc.enable()


def test_an_objective_has_one_end() -> None:
    value = lambda e, positions: e[:, 0, 0]  # noqa: E731
    with pytest.raises(SettingsError, match="not both"):
        Objective(value, lambda e, positions: positions > 0, top=1.0)
    assert Objective(value).goal is None and replace(Objective(value, top=1.0), top=None).goal is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU answers at once")
def test_on_a_gpu_the_answer_who_is_left_is_waited_for() -> None:
    x = pictures(12, views=3).cuda()
    weights = torch.linspace(-9, 9, 6 * x[0, 0].numel(), dtype=torch.float64, device="cuda").sin().reshape(-1, 6)
    goal = raise_hardness(torch.linspace(-0.3, 0.6, 12, dtype=torch.float64, device="cuda"))

    def slow(images: Tensor) -> Tensor:
        torch.cuda._sleep(10**7)
        return torch.tanh(images.flatten(1) @ weights)

    left, stayed = (ascend(Problem(slow, goal, Ball(0.2), Budget(12, 0.03, drop=drop)), x) for drop in (True, False))
    assert (left.images - stayed.images).abs().max() * 255 <= 1e-6
    assert left.active == stayed.active and left.image_steps < stayed.image_steps
