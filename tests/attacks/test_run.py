"""Running a goal: what it keeps, what it leaves alone, and what does not depend on the batch."""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anchorhold.attacks.goal import Goal, Scene
from anchorhold.attacks.menu import ATTACKS, goal_named
from anchorhold.attacks.run import BALL, PGD, Attacked, fgsm
from anchorhold.errors import DataError, SettingsError
from anchorhold.geometry import unit
from anchorhold.model.frozen import Embed, frozen
from anchorhold.perturb.ball import Ball
from anchorhold.perturb.settings import Budget
from anchorhold.random import Key
from tests.attacking import attack
from tests.attacks import World, pictures, world

KEY = Key.of(4)
PROTOCOLS = ["published", "corrected"]
LONG = Budget(6, 0.03)


def run(there: World, goal: Goal, ids: Tensor, budget: Budget = LONG, ball: Ball = Ball(0.1), **more: Any) -> Attacked:  # noqa: B008
    images = there.side(goal.side)[ids]
    return attack(there.embed, images, there.scene, goal, ids, ball, budget, KEY, **more)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", ATTACKS)
def test_batch_size_and_order_change_nothing(name: str, protocol: str, apart: bool) -> None:
    there, goal = world(apart=apart), ATTACKS[name](protocol)
    ids = torch.arange(0, 20, 2)
    whole = run(there, goal, ids)
    order = torch.tensor([3, 1, 0, 9, 8, 2, 7, 4, 6, 5])
    for found, rows in ((run(there, goal, ids, batch=3), torch.arange(10)), (run(there, goal, ids[order]), order)):
        assert (found.images - whole.images[rows]).abs().max() * 255 <= 1e-6
        assert found.image_steps == whole.image_steps
        for measure, values in whole.measures.items():
            assert torch.allclose(found.measures[measure], values[rows], equal_nan=True)
    assert all(values.shape == (10,) and values.dtype == torch.float64 for values in whole.measures.values())
    assert not torch.equal(whole.images, there.side(goal.side)[ids])


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("name", ATTACKS)
def test_stays_in_ball_and_range(name: str, norm: str) -> None:
    there, goal, eps = world(), ATTACKS[name]("corrected"), 0.2
    images = there.images.round(decimals=1)  # many pixels lie on the edge of the range
    there = World(there.embed, images, images, Scene.of(there.embed(images), there.scene.labels))
    for budget in (Budget(5, 0.09), Budget(5, 0.09, start="random")):
        found = run(there, goal, torch.arange(40), budget, Ball(eps, norm))  # type: ignore[arg-type]
        shift = (found.images - images).flatten(1)
        size = shift.abs().amax(1) if norm == "linf" else shift.norm(dim=1)
        assert 0 < size.max() <= eps * (1 + 1e-15)
        assert found.images.min() >= 0 and found.images.max() <= 1


@pytest.mark.parametrize("name", ["CA-", "QA+", "QA-", "GTT", "LTM", "margin", "untargeted", "targeted"])
def test_samples_that_are_done_leave_and_that_changes_nothing(name: str) -> None:
    there, goal = world(), ATTACKS[name]("corrected")
    budget = Budget(25, 0.09)
    stayed = run(there, goal, torch.arange(40), replace(budget, drop=False), Ball(0.9))
    left = run(there, goal, torch.arange(40), budget, Ball(0.9))
    assert (stayed.images - left.images).abs().max() * 255 <= 1e-6
    if name != "LTM":
        assert left.image_steps < stayed.image_steps


@pytest.mark.parametrize("name", ["CA-", "QA+", "QA-", "GTT", "LTM"])
def test_nobody_leaves_before_the_hinge_is_met(name: str) -> None:
    """A top below 0 would let samples go that can still be moved: a weaker attack that looks fast."""
    there, goal, ids = world(), ATTACKS[name]("corrected"), torch.arange(40)
    objective = goal.objective(there.scene, ids, goal.targets(there.scene, ids, Key.of(0)))
    e = (there.scene.clean(goal.side)[ids] + 0.3 * torch.randn(40, 1, generator=torch.Generator().manual_seed(0)))[
        :, None
    ]
    e = e.double().requires_grad_()
    value = objective.value(e, ids)
    assert objective.top == 0.0 and (value <= 0).all() and (value < 0).any()
    (slope,) = torch.autograd.grad(value.sum(), e)
    done = objective.met(e, ids, value)
    assert done is not None and torch.equal(done, value == 0) and (slope[done] == 0).all()


def test_what_both_protocols_share_is_run_once_and_measured_twice() -> None:
    there, ids = world(), torch.arange(0, 40, 2)
    shared = set()
    for name, make in ATTACKS.items():
        published, corrected = make("published"), make("corrected")
        found, other = run(there, published, ids), run(there, corrected, ids)
        if published.run == corrected.run:
            shared.add(name)
            assert torch.equal(found.images, other.images)
            again = found.measured(corrected, there.scene)
            assert all(torch.equal(again[key], other.measures[key]) for key in other.measures)
        else:
            assert not torch.equal(found.images, other.images), name
            with pytest.raises(SettingsError, match="another run"):
                found.measured(corrected, there.scene)
    assert shared == {"CA+", "CA-", "QA+", "QA-", "GTT", "TMA", "nearest", "margin", "untargeted", "targeted"}
    es = [ATTACKS["ES"]("published"), ATTACKS["ES"]("corrected", opening="sum")]
    assert es[0].run == es[1].run
    found = run(there, es[0], ids)
    assert torch.equal(found.measured(es[1], there.scene)["ES:D"], run(there, es[1], ids).measures["ES:D"])
    assert ATTACKS["CA+"]("corrected", w=2).run != ATTACKS["CA+"]("corrected").run


@pytest.mark.parametrize("name", ATTACKS)
def test_looking_back_sees_the_last_but_one(name: str) -> None:
    there, goal, ids = world(), ATTACKS[name]("published"), torch.arange(40)
    found, before = run(there, goal, ids, look_back=True), run(there, goal, ids, replace(LONG, steps=5))
    assert found.early is not None and torch.allclose(found.early, before.embeddings, atol=1e-12)
    none = run(there, goal, ids, replace(LONG, steps=0), look_back=True)
    assert torch.equal(none.images, there.images)
    assert none.early is not None and torch.allclose(none.early, there.scene.queries)


def test_the_default_budgets_are_those_of_print() -> None:
    assert (round(BALL.eps, 5), PGD.steps, round(PGD.alpha, 6), PGD.start) == (0.03137, 32, 0.011765, "zero")
    assert fgsm(Ball(0.05)) == Budget(1, 0.05)
    there, goal = world(), ATTACKS["TMA"]("corrected")
    found = run(there, goal, torch.arange(40), fgsm(Ball(0.05)), Ball(0.05))
    assert found.targets is not None
    x = there.images.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((there.embed(x) * there.scene.gallery[found.targets]).sum(), x)
    assert torch.allclose(found.images, (there.images + 0.05 * gradient.sign()).clamp(0, 1))


@pytest.mark.parametrize("name", ATTACKS)
def test_no_budget_no_change(name: str) -> None:
    there = world()
    for protocol, ball, budget in (("published", Ball(0.0), LONG), ("corrected", Ball(0.1), Budget(0))):
        goal = ATTACKS[name](protocol)
        if budget.steps == 0 and goal.prepare(budget).start == "tiny":
            continue  # ES starts a thousandth of the ball away
        found = run(there, goal, torch.arange(40), budget, ball)
        assert torch.equal(found.images, there.images)


# Models -----------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.drop, self.last = (
            nn.Linear(9, 12),
            nn.BatchNorm1d(12),
            nn.Dropout(0.5),
            nn.Linear(12, 6),
        )
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return unit(self.last(self.drop(torch.tanh(self.norm(self.first(x.flatten(1)))))))


@pytest.mark.parametrize("name", ATTACKS)
def test_leaves_parameters_gradients_buffers_and_modes_untouched(name: str) -> None:
    net, (images, labels) = Net().train(), pictures(20, 4, "queries")
    net.norm.eval()
    net.first.weight.grad = torch.ones_like(net.first.weight)
    modes = [m.training for m in net.modules()]
    state = copy.deepcopy(net.state_dict())
    inputs = images.clone()
    with frozen(net) as embed:
        scene, ids = Scene.of(embed(images), labels), torch.arange(20)
        found = attack(embed, images, scene, ATTACKS[name]("published"), ids, Ball(0.1), LONG, look_back=True)
    assert not torch.equal(found.images, images) and torch.equal(images, inputs)
    assert not found.embeddings.requires_grad and not found.images.requires_grad
    assert [m.training for m in net.modules()] == modes
    assert all(torch.equal(state[key], value) for key, value in net.state_dict().items())
    assert torch.equal(net.first.weight.grad, torch.ones_like(net.first.weight))
    assert net.last.weight.grad is None and all(p.requires_grad for p in net.parameters())


def check_fresh(view: Any) -> None:
    """Weights change under an open view, as they do between two audits: the attack sees the new ones."""
    net, (images, labels) = Net().eval(), pictures(20, 4, "queries")
    ids, goal = torch.arange(20), ATTACKS["margin"]("corrected")
    opened: AbstractContextManager[Embed] = view(net)
    with opened as embed:
        embed(images)
        with torch.no_grad():
            for p in net.parameters():
                p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1), dtype=p.dtype))
            now = net(images)
        found = attack(embed, images, Scene.of(now, labels), goal, ids, Ball(0.1), LONG)
        with torch.no_grad():
            truth = net(found.images)
    assert torch.allclose(found.embeddings, truth)
    expected = goal.measure(Scene.of(now, labels), ids, None, truth)
    assert torch.equal(found.measures["margin"], expected["margin"])


@contextmanager
def stale(model: nn.Module) -> Iterator[Embed]:
    old = copy.deepcopy(model)
    with frozen(old) as embed:
        yield embed


def test_a_stale_copy_of_the_weights_is_killed() -> None:
    check_fresh(frozen)
    with pytest.raises(AssertionError):
        check_fresh(stale)


def test_measures_in_full_precision_whatever_the_ascent_runs_in() -> None:
    net, (images, labels) = Net().float().eval(), pictures(20, 4, "queries")
    images = images.float()
    with frozen(net) as embed:
        scene = Scene.of(embed(images), labels)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = attack(embed, images, scene, ATTACKS["ES"]("published"), torch.arange(20), Ball(0.1), LONG)
        assert found.embeddings.dtype == torch.float32
        assert torch.allclose(found.embeddings, embed(found.images), atol=1e-6)


# Query and gallery apart, given targets, refusals -----------------------------------------------------------


def test_candidates_are_gallery_items_where_the_two_sides_differ() -> None:
    there = world(apart=True)
    last = torch.tensor([len(there.gallery) - 1])
    found = run(there, ATTACKS["CA+"]("corrected"), last)
    assert found.images.shape[0] == 1 and 0 <= found.measures["CA+"].item() < 1
    with pytest.raises(DataError, match="gallery side"):
        attack(there.embed, there.images[:1], there.scene, ATTACKS["CA+"]("corrected"), last + 1, Ball(0.1), LONG)


def test_given_targets_are_aimed_at() -> None:
    there, ids = world(), torch.arange(5)
    targets = torch.tensor([9, 8, 7, 6, 5])
    found = run(there, ATTACKS["TMA"]("corrected"), ids, targets=targets, batch=2)
    assert found.targets is not None and torch.equal(found.targets, targets)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda w, g: run(w, g, torch.arange(0)), DataError, "no samples"),
        (lambda w, g: run(w, g, torch.arange(2), batch=0), SettingsError, "at least 1"),
        (lambda w, g: run(w, g, torch.arange(2), targets=torch.arange(3)), DataError, "one row of targets"),
        (lambda w, g: attack(w.embed, w.images, w.scene, g, torch.arange(3)), DataError, "position of each image"),
        (lambda w, g: attack(w.embed, w.images[:1], w.scene, g, torch.tensor([40])), DataError, "query side"),
        (lambda w, g: run(w, g, torch.arange(2), Budget(3, keep="best"), look_back=True), SettingsError, "keep = last"),
        (lambda w, g: Scene.of(w.scene.gallery[:0], torch.arange(0)), DataError, "gallery is empty"),
        (lambda w, g: Scene.of(w.scene.gallery, torch.arange(3)), DataError, "one label"),
        (lambda w, g: replace(w.scene, queries=w.scene.queries[:, :2]), DataError, "do not fit"),
        (lambda w, g: goal_named("GTN", "corrected"), SettingsError, "did you mean GT"),
        (lambda w, g: goal_named("GTM", "printed"), SettingsError, "published, corrected"),
        (lambda w, g: g.measure(w.scene, torch.arange(2), None, w.scene.queries[:2]), DataError, "aims at targets"),
    ],
)
def test_refuses_what_makes_no_sense(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call(world(), ATTACKS["TMA"]("corrected"))
