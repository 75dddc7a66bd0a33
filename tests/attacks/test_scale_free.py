"""Objectives free of scale agree with what is measured, and do not change with scale or shift; the label attacks."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from anchorhold.attacks.goal import Goal, Scene
from anchorhold.attacks.label import SMALLEST, predicted, smallest_norms
from anchorhold.attacks.menu import ATTACKS
from anchorhold.attacks.run import Attack
from anchorhold.attacks.scale_free import halves, scale_free, without_end
from anchorhold.perturb.ball import Ball
from anchorhold.perturb.methods import METHODS
from anchorhold.perturb.problem import Objective
from anchorhold.perturb.settings import Budget
from anchorhold.random import Key
from tests.analytic import draw
from tests.attacking import attack
from tests.attacks import changed, dial, world

KEY = Key.of(2)
IDS = torch.arange(40)
APGD = Budget(20, start="random", keep="best", rule="apgd")


def moved(scene: Scene, scale: float, shift: Tensor) -> Scene:
    return replace(scene, gallery=scale * scene.gallery + shift, queries=scale * scene.queries + shift)


def made(name: str, scene: Scene) -> tuple[Goal, Tensor | None, Objective]:
    goal = ATTACKS[name]("corrected")
    targets = goal.targets(scene, IDS, KEY)
    return goal, targets, scale_free(goal, scene, IDS, targets)


def test_halves_order_and_differ_as_squared_distances_do() -> None:
    e, items, mean = draw(4, 6, name="e"), draw(9, 6, name="items"), draw(1, 6, name="mean")[0]
    squared = torch.cdist(e, items).square() / 2
    h = halves(e, items, mean)
    assert torch.allclose(h - h[:, :1], squared - squared[:, :1])


@pytest.mark.parametrize("name", ATTACKS)
def test_value_and_direction_do_not_change_with_scale_or_shift(name: str) -> None:
    scene = world().scene
    other = moved(scene, 1e-3, 5 * draw(1, 6, name="shift")[0])
    here = changed(scene.queries).requires_grad_()
    there = (1e-3 * here.detach() + 5 * draw(1, 6, name="shift")[0]).requires_grad_()
    goal = ATTACKS[name]("corrected")
    targets = goal.targets(scene, IDS, KEY)
    one = scale_free(goal, scene, IDS, targets).value(here[:, None], IDS)
    two = scale_free(goal, other, IDS, targets).value(there[:, None], IDS)
    assert torch.allclose(one, two, atol=1e-6)
    (a,), (b,) = torch.autograd.grad(one.sum(), here), torch.autograd.grad(two.sum(), there)
    assert torch.allclose(a, 1e-3 * b, atol=1e-6)


def test_the_spread_of_the_list_is_a_constant_in_the_gradient() -> None:
    scene = world().scene
    e = changed(scene.queries).requires_grad_()
    (found,) = torch.autograd.grad(made("margin", scene)[2].value(e[:, None], IDS).sum(), e)
    h = halves(e, scene.gallery, scene.gallery.mean(0))
    match = scene.labels[IDS][:, None] == scene.gallery_labels
    other = torch.arange(len(scene.gallery)) != scene.own[IDS][:, None]
    nearest = [h.masked_fill(~(which & other), torch.inf).min(1).values for which in (match, ~match)]
    gap = (nearest[0] - nearest[1]) / h.detach().std(1)
    (wanted,) = torch.autograd.grad(gap.clamp(max=0.05).sum(), e)
    assert wanted.abs().max() > 0.1 and torch.allclose(found, wanted, atol=1e-9)


@pytest.mark.parametrize("name", ["LTM", "GTM", "nearest", "margin", "untargeted", "targeted", "GTT"])
def test_above_zero_is_beaten(name: str) -> None:
    scene = world().scene
    goal, targets, objective = made(name, scene)
    e = changed(scene.queries, 0.6)
    beaten = goal.success(goal.measure(scene, IDS, targets, e))
    assert beaten is not None and beaten.any() and not beaten.all()
    aimed = torch.ones_like(beaten) if name != "nearest" else targets >= 0  # type: ignore[operator]
    assert torch.equal((objective.value(e[:, None], IDS) > 0)[aimed], beaten[aimed])


@pytest.mark.parametrize("name", ["CA+", "CA-", "QA+", "QA-"])
def test_the_smooth_rank_grows_with_the_rank(name: str) -> None:
    scene = world().scene
    goal, targets, objective = made(name, scene)
    e = changed(scene.queries, 0.6)
    value = objective.value(e[:, None], IDS) * (-1 if name.endswith("+") else 1)
    measured = goal.measure(scene, IDS, targets, e)[name]
    assert ((value > 0) & (value < 1)).all()
    assert torch.corrcoef(torch.stack([value, measured]))[0, 1] > 0.9


@pytest.mark.medium
@pytest.mark.parametrize("name", ATTACKS)
def test_every_goal_can_be_climbed_by_every_method_on_both_objectives(name: str) -> None:
    there = world()
    goal = ATTACKS[name]("corrected")
    images, targets = there.side(goal.side), goal.targets(there.scene, IDS, KEY)
    for objective in (None, scale_free):
        climbed = (goal.objective if objective is None else lambda *a: scale_free(goal, *a))(there.scene, IDS, targets)
        before = climbed.value(there.scene.clean(goal.side)[IDS, None], IDS)
        for method, find in METHODS.items():
            steepest = replace(APGD, rule="steepest", alpha=0.02)
            budget = {"pgd": steepest, "apgd": APGD}.get(method, Budget(APGD.steps))
            done = attack(
                there.embed, images, there.scene, goal, IDS, Ball(0.1), budget, KEY, method=find, objective=objective
            )
            after = climbed.value(done.embeddings[:, None], IDS)
            assert (done.images - images).abs().max() <= 0.1 * (1 + 1e-12)
            assert after.mean() > before.mean(), (method, objective)


# ---------------------------------------------------------------- ADML's equations 5 and 6


@pytest.mark.parametrize("apart", [False, True])
def test_labels_against_a_plain_loop(apart: bool) -> None:
    scene = world(apart=apart).scene
    e = changed(scene.queries)
    for name in ("untargeted", "targeted"):
        goal = ATTACKS[name]("corrected")
        targets = goal.targets(scene, IDS, KEY)
        assert targets is not None
        measured = goal.measure(scene, IDS, targets, e)[name]
        for i in range(40):

            def label(x: Tensor, i: int = i) -> int:
                far = [(float((x - g).norm()), j) for j, g in enumerate(scene.gallery) if j != int(scene.own[i])]
                return int(scene.gallery_labels[min(far)[1]])

            before, after = label(scene.queries[i]), label(e[i])
            if name == "untargeted":
                assert targets[i] == before and measured[i] == float(after == before)
            else:
                assert targets[i] != before and targets[i] in scene.gallery_labels
                assert measured[i] == float(after != targets[i])
    drawn = ATTACKS["targeted"]("corrected").targets(scene, IDS, KEY)
    assert drawn is not None and len(drawn.unique()) > 2


@pytest.mark.medium
def test_the_smallest_norm_on_a_circle() -> None:
    """Pixels are angles: the label changes halfway between the neighbours, and that is how far it is."""
    there = dial(0.1, 0.2, 0.5, 0.9, labels=[0, 0, 1, 1])
    scene, ids, goal = there.scene, torch.arange(1, 4), ATTACKS["untargeted"]("corrected")
    assert predicted(scene, ids, scene.queries[ids]).tolist() == [0, 0, 1]
    found = smallest_norms(
        Attack(there.embed, scene, goal, Ball(0.0), SMALLEST, KEY), there.images[1:], ids, highest=0.5, searches=10
    )
    # 0.2 goes to 0.3, between 0.1 and 0.5; 0.5 to 0.55, between 0.2 and 0.9; for 0.9 it is 0.35, too far.
    assert torch.allclose(found[:2], torch.tensor([0.1, 0.05], dtype=torch.float64), atol=1e-3)
    assert found[2].isinf()


@pytest.mark.slow
def test_success_at_a_given_eps_agrees_with_the_smallest_norm() -> None:
    there, goal = world(), ATTACKS["targeted"]("corrected")
    norms = smallest_norms(
        Attack(there.embed, there.scene, goal, Ball(0.0), SMALLEST, KEY), there.images, IDS, highest=0.3, searches=6
    )
    targets = goal.targets(there.scene, IDS, KEY)
    way = Budget(50, start="random", restarts=3, keep="best", rule="apgd")
    done = attack(there.embed, there.images, there.scene, goal, IDS, Ball(0.3), way, KEY, targets=targets)
    assert torch.equal(done.success, norms <= 0.3)
    assert (norms <= 0.3).any() and len(norms.unique()) > 3


@pytest.mark.parametrize("name", ATTACKS)
def test_without_end_nobody_is_done_and_it_is_the_same_up_to_there(name: str) -> None:
    scene = world().scene
    goal, targets, objective = made(name, scene)
    endless = without_end(goal, scene, IDS, targets)
    far = changed(scene.queries, 3.0)[:, None].requires_grad_()
    stopped, on = objective.value(far, IDS), endless.value(far, IDS)
    assert endless.goal is None
    below = stopped < 0.049
    assert torch.allclose(stopped[below], on[below]) and (on >= stopped - 1e-12).all()
    (gradient,) = torch.autograd.grad(on.sum(), far)
    assert (gradient[~below].abs().amax((1, 2)) > 0).all()  # and units beyond it still have a gradient
