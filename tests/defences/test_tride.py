"""CA-TRIDE: what collapseness is, what each phase moves and how far, how phases alternate, paper against code."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorhold as ah
from anchorhold import losses
from anchorhold.config.recipes import settings_from
from anchorhold.defences.hardness import hardness_manipulation
from anchorhold.defences.menu import DEFENCES
from anchorhold.defences.natural import natural
from anchorhold.defences.settings import HardnessSettings, NaturalSettings, TrideSettings
from anchorhold.defences.step import Step
from anchorhold.defences.tride import (
    PERTURBED,
    anp_loss,
    anp_loss_as_coded,
    entanglement,
    hinged,
    move_anchor,
    move_candidates,
    nearest_part,
    raised,
    top_rank_loss,
    triplet_decoupling,
    weighted_collapseness,
    window_at,
)
from anchorhold.errors import SettingsError
from anchorhold.geometry import euclidean
from anchorhold.perturb.ascend import ascend
from anchorhold.perturb.ball import Ball
from anchorhold.perturb.problem import Ascent, Problem
from anchorhold.perturb.settings import Budget
from anchorhold.report.training_page import write_training_page
from anchorhold.runs.summary import summary_of
from anchorhold.training.evaluation import attention_of
from anchorhold.triplets import collapseness, hardness
from tests.analytic import draw, tanh_embedder
from tests.defences.test_hardness import KEY, make_step, train
from tests.training.test_fit import fit, same

NAIVE: dict[str, Any] = {"guide": "hardness", "stop": False, "top_rank_term": False, "top_rank_loss": False}
STRONG: dict[str, Any] = {"eps": 0.2, "alpha": 0.05, "steps": 5, "progressive": False}
SHORT: dict[str, Any] = {"batch": {"pairs": 128}, "defence": {"steps": 2}}  # training on digits


# Collapseness -----------------------------------------------------------------------------------------------


def distances(count: int = 9) -> tuple[Tensor, Tensor]:
    return KEY("p").uniform(torch.arange(count)) + 0.1, KEY("n").uniform(torch.arange(count)) + 0.4


def test_collapseness_without_attention_is_the_mean_hardness() -> None:
    p, n = distances()
    for far in (False, True):
        assert torch.allclose(collapseness(p, n, 0.0, far=far), (p - n).mean(), atol=1e-15)
    assert torch.equal(raised(TrideSettings(guide="hardness"), p, n), (p - n).mean())
    assert torch.equal(raised(TrideSettings(attention=3.0), p, n), collapseness(p, n, 3.0))


@pytest.mark.parametrize("far", [False, True])
def test_collapseness_against_a_plain_loop(far: bool) -> None:
    p, n = distances()
    sides = []
    for d in (p.tolist(), n.tolist()):
        w = [math.exp(10 * (x - max(d)) if far else -10 * (x - min(d))) for x in d]
        sides.append(sum(a * b for a, b in zip(w, d)) / sum(w))
    assert collapseness(p, n, 10.0, far=far).item() == pytest.approx(sides[0] - sides[1], abs=1e-12)
    near, plain = collapseness(p, n, 10.0), (p - n).mean()
    assert not torch.allclose(near, plain) and not torch.allclose(near, collapseness(p, n, 10.0, far=True))


@pytest.mark.parametrize("far", [False, True])
def test_the_gradient_of_collapseness_with_and_without_its_weights(far: bool) -> None:
    p, n = (d.requires_grad_(True) for d in distances())
    assert torch.autograd.gradcheck(lambda p, n: collapseness(p, n, 3.0, far=far, carry=True), (p, n))
    up, down = torch.autograd.grad(collapseness(p, n, 3.0, far=far), (p, n))
    sign = 3.0 if far else -3.0
    assert torch.allclose(up, torch.softmax(sign * p, 0)) and torch.allclose(down, -torch.softmax(sign * n, 0))
    # Through the weights a pair far beyond the weighted mean is pushed the wrong way; that is why they are constants.
    carried, _ = torch.autograd.grad(collapseness(p, n, 10.0, far=far, carry=True), (p, n))
    assert (carried < 0).any() and (up > 0).all()


# The two losses of the attack, and the loss of the top rank -------------------------------------------------


def test_anp_losses_in_numbers() -> None:
    """Equations 11 and 12, and the code's: the sign of C and the factor differ, and the factor is a constant."""
    for c, top in ((-0.3, 0.4), (0.3, 0.4), (0.3, -0.4)):
        x, y = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (c, top))
        paper, code = anp_loss(x, y), anp_loss_as_coded(x, y)
        assert paper.item() == pytest.approx(-c + math.exp(max(c, 0)) * top)
        assert code.item() == pytest.approx(max(c, 0) + math.exp(min(c, 0)) * max(top, 0))
        dc, dtop = torch.autograd.grad(paper, (x, y))
        assert dc == -1 and dtop.item() == pytest.approx(math.exp(max(c, 0)))
        assert torch.autograd.grad(code, x)[0] == (1 if c > 0 else 0)


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_the_nearest_part_and_the_loss_of_the_top_rank(count: int) -> None:
    p, n = distances(count)
    half = max(count // 2, 1)
    near = [sum(sorted(d.tolist())[:half]) / half for d in (p, n)]
    assert nearest_part(p).item() == pytest.approx(near[0])
    assert top_rank_loss(p, n, 0.5).item() == pytest.approx(max(0.0, near[0] - near[1] + 0.5))


# The attack -------------------------------------------------------------------------------------------------


def attack(
    phase: str, settings: TrideSettings, watch: Any = None, drop: bool = True
) -> tuple[Ascent, Tensor, Tensor, Tensor]:
    """The attack of one phase on drawn triplets: what it found, the images, and the triplets' embeddings after it."""
    embed = tanh_embedder(9)
    # The positives are near the anchors, so that C < 0 to begin with.
    a, n = (0.2 + 0.6 * KEY(name).uniform(torch.arange(6), (1, 3, 3)) for name in ("a", "n"))
    images = torch.stack([a, 0.9 * a + 0.1 * n, n], dim=1)
    clean = embed(images.flatten(0, 1)).unflatten(0, (-1, 3))
    goal = move_candidates(clean[:, 0], settings) if phase == "cap" else move_anchor(clean, settings)
    members, budget = PERTURBED[phase], replace(settings.budget, drop=drop)
    found = ascend(Problem(embed, goal, settings.ball, budget), images[:, members], watch=watch)
    after = images.clone()
    after[:, members] = found.images
    return found, images, clean, embed(after.flatten(0, 1)).unflatten(0, (-1, 3))


def collapse_of(e: Tensor, **more: Any) -> Tensor:
    a, p, n = e.unbind(1)
    return collapseness(euclidean(a, p), euclidean(a, n), **more)


def test_with_constant_weights_candidates_move_as_hardness_has_it() -> None:
    """Each candidate has one weight, above 0, so λ only says when to stop. An anchor has two, which λ sets off."""
    by_c, by_h, carried = (
        attack("cap", TrideSettings(**{**NAIVE, **STRONG, **change}))[0].images
        for change in ({"guide": "collapseness"}, {}, {"guide": "collapseness", "weights_carry_gradient": True})
    )
    assert torch.equal(by_c, by_h) and not torch.equal(by_c, carried)
    e = torch.nn.functional.normalize(draw(4, 3, 5), dim=2)
    a, p, n = e.unbind(1)
    a = a.clone().requires_grad_(True)
    goal = move_anchor(e, TrideSettings(**{**NAIVE, "guide": "collapseness", "attention": 2.0}))
    (found,) = torch.autograd.grad(goal.value(a.unsqueeze(1), torch.arange(4)), a)
    with torch.no_grad():
        pull, push = (a - p + 1e-6) / euclidean(a, p)[:, None], (a - n + 1e-6) / euclidean(a, n)[:, None]
        towards, away = (torch.softmax(-2 * euclidean(a, x), 0)[:, None] for x in (p, n))
    assert torch.allclose(found, towards * pull - away * push, atol=1e-12)


@pytest.mark.parametrize("phase", ["cap", "anp"])
def test_the_attack_raises_its_own_objective(phase: str) -> None:
    settings = TrideSettings(**{**STRONG, "eps": 0.05, "alpha": 0.01})
    _, _, clean, after = attack(phase, settings)
    goal = move_candidates(clean[:, 0], settings) if phase == "cap" else move_anchor(clean, settings)
    members, rows = PERTURBED[phase], torch.arange(len(clean))
    assert goal.value(clean[:, members], rows) < goal.value(after[:, members], rows) <= 0
    assert collapse_of(clean) < collapse_of(after)


@pytest.mark.parametrize(
    ("phase", "change"),
    [
        ("cap", {}),
        ("anp", {"top_rank_term": False}),
        ("cap", {"guide": "hardness"}),
        ("cap", {"form": "code", "weights_carry_gradient": True}),
    ],
)
def test_the_batch_stops_exactly_when_the_goal_is_met(phase: str, change: dict[str, Any]) -> None:
    settings = TrideSettings(eps=0.5, alpha=0.02, steps=40, **change)
    seen: list[Tensor] = []
    found, images, *_ = attack(phase, settings, watch=lambda step, x, rows: seen.append(x.clone()))
    embed, members = tanh_embedder(9), PERTURBED[phase]
    reached = []
    for x in seen:
        triplets = images.clone()
        triplets[:, members] = x
        a, p, n = embed(triplets.flatten(0, 1)).unflatten(0, (-1, 3)).unbind(1)
        reached.append(raised(settings, euclidean(a, p), euclidean(a, n)).item())
    enough = -1e-5 if settings.form == "code" else 0
    assert max(reached[:-1]) < enough <= reached[-1] and 1 < len(seen) < 40
    assert torch.equal(found.images, seen[-1])
    # The rest of the steps would have changed nothing, and was not paid for.
    stayed, *_ = attack(phase, settings, drop=False)
    assert torch.equal(stayed.images, found.images)
    assert found.image_steps == len(seen) * 6 * len(members) < stayed.image_steps == 40 * 6 * len(members)


def test_without_a_stop_it_goes_on() -> None:
    for phase in ("cap", "anp"):
        stopped, endless = (
            attack(phase, TrideSettings(**{**NAIVE, "stop": stop, "eps": 0.5, "alpha": 0.02, "steps": 40}))
            for stop in (True, False)
        )
        assert hardness(*endless[3].unbind(1)).mean() > hardness(*stopped[3].unbind(1)).mean() + 0.1
    e = torch.zeros(1, 3, 2)
    for goal in (move_anchor(e, TrideSettings(**NAIVE)), move_candidates(e[:, 0], TrideSettings(**NAIVE))):
        assert goal.goal is None  # or every step would wait to learn whether it is over


@pytest.mark.parametrize("form", ["paper", "code"])
@pytest.mark.parametrize("term", [True, False])
def test_what_each_phase_climbs_against_plain_numbers(form: Any, term: bool) -> None:
    """Equations 5 to 12, and the code's, on moved members of a batch whose clean triplets are known."""
    settings = TrideSettings(form=form, top_rank_term=term, attention=3.0)
    clean, moved = (torch.nn.functional.normalize(draw(4, 3, 5, name=name), dim=2) for name in ("clean", "moved"))
    rows, half, seen = torch.arange(4), 2, set()

    def d(x: Tensor, y: Tensor) -> list[float]:
        return [math.dist((u + 1e-6).tolist(), v.tolist()) for u, v in zip(x, y)]

    def mean(x: list[float], sign: float) -> float:
        w = [math.exp(sign * 3.0 * v) for v in x]
        return sum(a * b for a, b in zip(w, x)) / sum(w)

    sign = 1.0 if form == "code" else -1.0
    for t in (0.0, 0.5, 1.0):  # C < 0, then C > 0 as positives and negatives change places
        triplets = torch.stack([clean[:, 0], *((1 - t) * clean[:, i] + t * clean[:, 3 - i] for i in (1, 2))], dim=1)
        ap, an = d(clean[:, 0], triplets[:, 1]), d(clean[:, 0], triplets[:, 2])
        expected = max(-(mean(ap, sign) - mean(an, sign)), 0)
        found = move_candidates(clean[:, 0], settings).value(triplets[:, 1:], rows)
        assert found.item() == pytest.approx(-expected, abs=1e-12)

        ap, an, own = (d(moved[:, 0], x) for x in (triplets[:, 1], triplets[:, 2], clean[:, 0]))
        c = mean(ap, sign) - mean(an, sign)
        top = (sum(sorted(an)[:half]) / half - sum(own) / 4) * term
        if form == "paper":
            expected = max(-c + math.exp(max(c, 0)) * top, 0)
        else:
            expected = max(c, 0) + math.exp(min(c, 0)) * max(top, 0)
        found = move_anchor(triplets, settings).value(moved[:, :1], rows)
        assert found.item() == pytest.approx(-expected, abs=1e-12)
        seen.add(c > 0)
    assert seen == {True, False}


def written_out(
    a: Tensor, p: Tensor, n: Tensor, own: Tensor, attention: float, share: float = 0.5
) -> dict[str, Tensor]:
    """Equations 5 to 13 of Tian et al. (2024), one after the other; autograd goes through the weights of C."""

    def d(x: Tensor, y: Tensor) -> Tensor:
        return (x - y + 1e-6).square().sum(1).sqrt()

    def weighted(distances: Tensor) -> Tensor:
        w = torch.exp(-attention * (distances - distances.min()))  # 7
        return (w * distances).sum() / w.sum()  # 6

    def top_half(distances: Tensor) -> Tensor:
        return distances.sort().values[: int(len(distances) * share)].mean()

    c = weighted(d(a, p)) - weighted(d(a, n))  # 5
    cap = (-c).clamp(min=0)  # 10
    delta = c.detach().clamp(min=0).exp() * (top_half(d(a, n)) - d(a, own).mean())  # 12
    anp = (-c + delta).clamp(min=0)  # 11
    rank = 0.5 * (top_half(d(a, p)) - top_half(d(a, n)) + 0.04).clamp(min=0)  # 13
    train = (d(a, p) - d(a, n) + 0.2).clamp(min=0).mean()  # L_T
    return {"cap": cap, "anp": anp, "train-cap": train, "train-anp": train + rank}  # 14


@pytest.mark.parametrize("seed", ["one", "two", "three"])
@pytest.mark.parametrize("attention", [2.0, 10.0])
def test_the_literal_form_follows_the_equations_gradient_and_all(seed: str, attention: float) -> None:
    settings = TrideSettings(weights_carry_gradient=True, attention=attention)
    clean, moved = (
        torch.nn.functional.normalize(draw(8, 3, 6, name=f"{seed} {name}"), dim=2) for name in ("clean", "moved")
    )
    own, rows, turned = clean[:, 0], torch.arange(8), 0
    for phase, members in PERTURBED.items():
        triplets = clean.clone()
        triplets[:, members] = moved[:, members]
        triplets.requires_grad_(True)
        a, p, n = triplets.unbind(1)
        expected = -written_out(a, p, n, own, attention)[phase]
        goal = move_candidates(own, settings) if phase == "cap" else move_anchor(clean, settings)
        unit = triplets[:, members]
        found = goal.value(unit, rows)
        assert found.item() == pytest.approx(expected.item(), abs=1e-12)
        gradients = [torch.autograd.grad(v, triplets, retain_graph=True)[0][:, members] for v in (found, expected)]
        assert torch.allclose(*gradients, atol=1e-12)
        held = move_candidates(own, replace(settings, weights_carry_gradient=False)) if phase == "cap" else None
        if held is not None and found:  # through the weights some candidates are pushed the other way
            (other,) = torch.autograd.grad(held.value(unit, rows), triplets)
            turned = int(((other[:, members] * gradients[0]).sum(2) < 0).sum())
            assert turned or attention < 10
        # What is trained on: L_T, and after ANP L_TR (equations 13 and 14).
        loss = losses.triplet(a, p, n, settings.margin)
        if phase == "anp":
            positive, negative = euclidean(a, p), euclidean(a, n)
            loss = loss + settings.gamma * top_rank_loss(positive, negative, settings.beta)
        expected = written_out(a, p, n, own, attention)[f"train-{phase}"]
        pair = [torch.autograd.grad(v, triplets, retain_graph=True)[0] for v in (loss, expected)]
        assert loss.item() == pytest.approx(expected.item(), abs=1e-12) and torch.allclose(*pair, atol=1e-12)


STEPS: list[dict[str, Any]] = [
    {"weights_carry_gradient": True},  # the literal form
    {"weights_carry_gradient": True, "top_share": 0.8, "attention": 4.0},
    {"weights_carry_gradient": True, "sampler": "softhard", "own_positive": False, "ics": 0.5},
    {"weights_carry_gradient": True, "sampler": "distance", "lower": 0.2, "upper": 1.4},
    {"weights_carry_gradient": True, "sampler": "hardest", "ics": 2.0, "top_share": 0.25},
    {"weights_carry_gradient": True, "sampler": "random", "adaptive": 60.0},
]


@pytest.mark.parametrize("change", STEPS)
@pytest.mark.parametrize("phase", ["cap", "anp"])
def test_a_whole_step_is_the_equations_with_any_sampler_share_and_ics(phase: Any, change: dict[str, Any]) -> None:
    """From mining to the gradient of the weights; adaptive λ is 10 + 60 (d_intra / d_inter − 0.787)."""
    change = {name: value for name, value in change.items() if name != "ics" or phase == "anp"}
    settings = TrideSettings(phases=phase, **STRONG, **change)
    step = make_step()
    if settings.ics:  # positives so near that an anchor moves beyond them
        step.batch.images[1::2] = 0.9 * step.batch.images[0::2] + 0.1 * step.batch.images[1::2]
    loss, gradients = train(step, triplet_decoupling(step, settings))
    x, model = step.batch.images, step.model
    with torch.no_grad():
        e, labels = model(x), step.batch.labels
    cuts = {"lower": settings.lower or None, "upper": settings.upper or None, "own_positive": settings.own_positive}
    drawn = step.mine(settings.sampler, e, window_at(settings, 0, 1), **cuts)
    clean = [x[index] for index in (drawn.anchor, drawn.positive, drawn.negative)]
    attention = settings.attention
    if settings.adaptive:
        apart = torch.cdist(e, e)
        same = labels[:, None] == labels
        attention += 60 * (apart[same & ~torch.eye(len(e), dtype=torch.bool)].mean() / apart[~same].mean() - 0.787)
        attention = max(float(attention), 0.0)
    views = [view.clone() for view in clean]
    for count in range(settings.steps):
        for i in PERTURBED[phase]:
            views[i] = views[i].detach().requires_grad_()
        a, p, n = (model(view) for view in views)
        own = model(clean[0]).detach() if count else a  # the distance of an anchor to itself has no direction
        goal = written_out(a, p, n, own, attention, settings.top_share)[phase]
        for i, g in zip(PERTURBED[phase], torch.autograd.grad(goal, [views[i] for i in PERTURBED[phase]])):
            moved = views[i].detach() - settings.alpha * g.sign()
            views[i] = (clean[i] + (moved - clean[i]).clamp(-settings.eps, settings.eps)).clamp(0, 1)
    a, p, n = (model(view) for view in views)
    expected = written_out(a, p, n, a, attention, settings.top_share)[f"train-{phase}"]
    if settings.ics:
        own, partner = model(clean[0]), model(clean[1])
        there, here = ((own - y + 1e-6).square().sum(1).sqrt() for y in (a, partner))
        assert (there > here).any()
        expected = expected + settings.ics * (there - here).clamp(min=0).mean()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-9)
    wanted = torch.autograd.grad(expected, [w for w in model.parameters() if w.grad is not None])
    assert all(torch.allclose(x, y, atol=1e-9) for x, y in zip(gradients, wanted, strict=True))


def test_lambda_follows_a_running_mean_of_the_entanglement() -> None:
    logged: list[float] = []
    state: dict[str, Tensor] = {}
    step = make_step(state=state, log=lambda name, value, _=1.0: logged.append(value) if name == "attention" else None)
    settings = TrideSettings(adaptive=60.0, **STRONG)
    found = entanglement(step.model(step.batch.images).detach(), step.batch.labels, step.batch.ids).item()
    train(step, triplet_decoupling(step, settings))
    assert logged == [pytest.approx(max(10 + 60 * (found - 0.787), 0))] and state["entanglement"].item() == found
    state["entanglement"] = torch.tensor(0.8)
    train(step, triplet_decoupling(step, settings))
    mean = 0.9 * 0.8 + 0.1 * found
    assert logged[1] == pytest.approx(max(10 + 60 * (mean - 0.787), 0), abs=1e-5)
    # The paper's three data sets: 0.79 and 10, 0.79 and 9.5, 0.66 and 2.
    for within, between, printed in ((0.226, 0.287, 10.0), (0.256, 0.325, 9.5), (0.438, 0.664, 2.0)):
        assert 10 + 60 * (within / between - 0.787) == pytest.approx(printed, abs=0.6)
    # A batch of one class has no pair of two: λ stays.
    train(lone := make_step(labels=[4] * 8, state=state), triplet_decoupling(lone, settings))
    assert logged[2:] == [] and state["entanglement"].item() == pytest.approx(mean, abs=1e-6)
    train(lone := make_step(labels=[4] * 8), triplet_decoupling(lone, settings))
    assert "entanglement" not in lone.state


def test_an_image_that_is_drawn_twice_is_no_pair() -> None:
    e, labels = torch.tensor([[0.0], [0.0], [1.0], [4.0]]), torch.tensor([0, 0, 0, 1])
    assert entanglement(e, labels, torch.tensor([7, 7, 8, 9])).item() == pytest.approx(1.0 / (11 / 3))
    assert entanglement(e, labels, torch.arange(4)).item() == pytest.approx((2 / 3) / (11 / 3))


def test_a_run_logs_collapseness_with_the_lambda_of_its_data_set() -> None:
    for data, recipe, attention in (
        *(("cub", "catride", 10.0), ("cars", "catride", 9.5), ("sop", "catride", 2.0)),
        *(("cub", "hm-lga", 10.0), ("cars", "hm-lga", 9.5), ("sop", "natural", 2.0), ("digits", "natural", 10.0)),
    ):
        assert attention_of(settings_from(recipe, {"data": {"name": data}})) == attention
    assert attention_of(settings_from("catride", {"defence": {"attention": 3}})) == 3


def test_a_run_records_the_lambda_of_its_collapseness(tmp_path: Path) -> None:
    for recipe, changes, attention in (("natural", {}, 10.0), ("catride", {"defence.attention": 3}, 3.0)):
        run = ah.fit(None, "digits", recipe, tmp_path / recipe, overrides={"train.epochs": 1, **changes}, device="cpu")
        info = run.read_json()
        assert info["attention"] == attention == summary_of(info)["attention"]
        assert f"λ = {attention:g}" in write_training_page(run.path).read_text(encoding="utf-8")
    start = ah.fit(None, "digits", "distil", tmp_path / "distil", overrides={"train.epochs": 1}, device="cpu")
    assert "attention" not in start.read_json()  # a pretraining logs no collapseness


def test_the_first_step_of_anp_ignores_the_distance_of_an_anchor_to_itself() -> None:
    """Its direction there would be that of rounding errors, here exaggerated."""
    settings = TrideSettings(eps=0.1, alpha=0.05, steps=1)
    e = torch.nn.functional.normalize(draw(4, 3, 5), dim=2)
    goal = move_anchor(e, settings)
    assert goal.first is not None
    for noise in (0.0, 1e-9 * draw(4, 1, 5, name="noise")):
        x = (e[:, :1] + noise).requires_grad_(True)
        c = collapseness(euclidean(x[:, 0], e[:, 1]), euclidean(x[:, 0], e[:, 2]))
        loss = -c + math.exp(max(c.item(), 0)) * nearest_part(euclidean(x[:, 0], e[:, 2]))
        expected, first = (torch.autograd.grad(v, x)[0] for v in (-loss, goal.first(x, torch.arange(4))))
        assert torch.allclose(first, expected, atol=1e-12)
    x = (e[:, :1] + 0.3 * draw(4, 1, 5, name="far")).requires_grad_(True)
    moved = goal.first(x, torch.arange(4)) - goal.value(x, torch.arange(4))
    assert moved.abs() > 0.1  # afterwards it counts


def test_in_the_code_s_form_the_first_step_is_that_of_torch_s_constant() -> None:
    """Where e is exactly clean, |e − clean + 1e-6| has a direction of its own: the sum of the coordinates."""
    clean = torch.nn.functional.normalize(draw(6, 3, 5, name="leaving"), dim=2)
    clean[:, 2] = -clean[:, 0]  # C < 0: only the top rank counts
    goal = move_anchor(clean, TrideSettings(form="code", weights_carry_gradient=True))
    x, rows = clean[:, :1].clone().requires_grad_(), torch.arange(6)
    assert goal.first is not None
    expected, first = (torch.autograd.grad(each(x, rows), x)[0] for each in (goal.value, goal.first))
    assert torch.allclose(first, expected, atol=1e-6)
    assert (first.flatten(1).norm(dim=1) > 0.1).all()  # every anchor moved
    assert goal.first(x, rows).item() == pytest.approx(goal.value(x, rows).item(), abs=1e-5)


@pytest.mark.parametrize("theta", [0.3, 1.0, 2.0, math.pi])
def test_hardness_gained_per_shift_in_closed_form(theta: float) -> None:
    """In the plane: 2·sin(θ/2) where the anchor moves, 1 for each candidate at any angle θ between them."""
    a = torch.tensor([0.5, 0.5], dtype=torch.float64)
    p, n = (a + 0.3 * torch.tensor([math.cos(x), math.sin(x)], dtype=torch.float64) for x in (0.0, theta))
    triplet = torch.stack([a, p, n]).unsqueeze(0)
    length, settings = 1e-4, TrideSettings(**NAIVE)
    for members, goal, gain in (
        ([0], move_anchor(triplet, settings), 2 * math.sin(theta / 2)),
        ([1, 2], move_candidates(triplet[:, 0], settings), 2.0),
    ):
        after = triplet.clone()
        found = ascend(Problem(lambda x: x, goal, Ball(1.0, "l2"), Budget(1, length)), triplet[:, members])
        after[:, members] = found.images
        shift = (after - triplet)[:, members].norm(dim=2)
        if len(members) == 2:  # one step of length α for each image
            assert torch.allclose(shift, torch.full_like(shift, length), atol=1e-12)
        gained = (hardness(*after.unbind(1)) - hardness(*triplet.unbind(1))).item()
        assert gained / shift.mean().item() == pytest.approx(gain, rel=2e-3)


# A step of training -----------------------------------------------------------------------------------------


def run(step: Step, settings: TrideSettings) -> tuple[Tensor, list[Tensor], Tensor, dict[str, float]]:
    """Loss, gradients, the triplets (U, 3, …) that were trained on, and the log."""
    seen: list[Tensor] = []
    logged: dict[str, float] = {}
    step = replace(step, log=lambda name, value, weight=1.0: logged.update({name: float(value)}))
    embed = step.embed
    step.embed = lambda images: seen.append(images) or embed(images)  # type: ignore[func-returns-value, method-assign]
    frozen, logged["embedded"] = step.frozen, 0

    @contextmanager
    def counting() -> Iterator[Any]:
        with frozen() as view:

            def counted(images: Tensor) -> Tensor:
                logged["embedded"] += len(images)
                return view(images)

            yield counted

    step.frozen = counting  # type: ignore[method-assign]
    loss, gradients = train(step, triplet_decoupling(step, settings))
    return loss, gradients, seen[0].unflatten(0, (-1, 3)), logged


def test_each_phase_moves_its_own_members() -> None:
    step = make_step()
    for phase, moves in (("cap", [False, True, True]), ("anp", [True, False, False])):
        settings = TrideSettings(phases=phase, **{**NAIVE, **STRONG})  # type: ignore[arg-type]
        _, _, units, logged = run(step, settings)
        _, _, clean, _ = run(step, replace(settings, eps=0.0, steps=0))
        assert [not torch.equal(units[:, i], clean[:, i]) for i in range(3)] == moves
        assert (units - clean).abs().max() <= 0.2 + 1e-12
        before, after = (step.embed(x.flatten(0, 1)).detach().unflatten(0, (-1, 3)) for x in (clean, units))
        for when, e in (("before", before), ("after", after)):
            assert logged[f"hardness_{when}"] == pytest.approx(hardness(*e.unbind(1)).mean().item())
            assert logged[f"collapseness_{when}"] == pytest.approx(collapse_of(e).item())
        assert logged["hardness_after"] > logged["hardness_before"]
        e = step.embed(step.batch.images).detach()
        spread = torch.stack([euclidean(e[i], e[j]) for i in range(12) for j in range(12) if i != j]).mean()
        shift = euclidean(before, after)[:, moves].mean() / spread
        for mean in ("all", "perturbed"):  # the batch moves as a whole
            found = logged[f"shift_{mean}"]
            assert found == logged[f"shift_{mean}_{phase}"] == pytest.approx(shift.item(), rel=1e-3)
            assert logged[f"shift_overall_{mean}"] == pytest.approx(sum(moves) * found)


def test_image_steps_are_two_thirds_and_one_third_of_hardness_manipulation() -> None:
    step, logged = make_step(), {}
    step.log = lambda name, value, weight=1.0: logged.update({name: float(value)})
    train(step, hardness_manipulation(step, HardnessSettings(destination=2.0, eps=0.2, alpha=0.05, steps=5)))
    for phase, part in (("cap", 2 / 3), ("anp", 1 / 3)):
        own = run(make_step(), TrideSettings(phases=phase, stop=False, **STRONG))[3]  # type: ignore[arg-type]
        assert own["image_steps"] == pytest.approx(part * logged["image_steps"])
        # Nor is anything more embedded, with a gradient or without, than what moves.
        assert own["embedded"] == own["image_steps"] + len(step.batch.images)


def test_the_log_tells_whether_the_batch_was_stopped() -> None:
    step = make_step()
    wide: dict[str, Any] = {"phases": "cap", "eps": 0.5, "alpha": 0.02, "steps": 60, "progressive": False}
    stopped = run(step, TrideSettings(attention=1.0, **wide))[3]
    assert stopped["active_first"] == 1 and stopped["collapseness_before"] < 0
    assert stopped["active_last"] == 0 and 0 <= stopped["collapseness_after"] < 0.3
    endless = run(step, TrideSettings(**NAIVE, **wide))[3]
    assert endless["active_last"] == 1 and endless["hardness_after"] > 0
    assert endless["image_steps"] == 60 * 12 > stopped["image_steps"]


@pytest.mark.parametrize("phase", ["cap", "anp"])
def test_without_its_attack_it_is_natural_training_and_the_top_rank(phase: Any) -> None:
    step = make_step()
    settings = TrideSettings(phases=phase, eps=0.0, steps=0, window=0.4, top_rank_loss=False)
    plain = train(step, natural(in_its_window(step, settings), NaturalSettings("semihard")))
    still = run(step, settings)
    assert torch.allclose(plain[0], still[0], atol=1e-12)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(plain[1], still[1]))
    ranked, gradients, units, _ = run(step, replace(settings, top_rank_loss=True, beta=0.9))
    e = step.embed(units.flatten(0, 1)).unflatten(0, (-1, 3))
    near, far = euclidean(e[:, 0], e[:, 1]), euclidean(e[:, 0], e[:, 2])
    extra = 0.5 * top_rank_loss(near, far, 0.9)
    assert extra > 0 and torch.allclose(ranked, still[0] + (extra if phase == "anp" else 0), atol=1e-12)
    wanted = torch.relu(near - far + 0.2).mean() + (extra if phase == "anp" else 0)
    _, expected = train(step, iter([wanted]))
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(gradients, expected, strict=True))


def in_its_window(step: Step, settings: TrideSettings) -> Step:
    """The step, mining inside CA-TRIDE's window whatever it is asked for."""
    step = replace(step)
    mine, window = step.mine, window_at(settings, step.epoch, step.epochs)
    step.mine = lambda sampler, embeddings, margin: mine(sampler, embeddings, window)  # type: ignore[assignment, method-assign, misc]
    return step


# Alternation ------------------------------------------------------------------------------------------------


def phase_of(step: Step, settings: TrideSettings) -> str:
    logged = run(step, settings)[3]
    return next(phase for phase in ("cap", "anp") if f"shift_all_{phase}" in logged)


def test_phases_alternate_from_cap_on_and_go_on_after_a_resume() -> None:
    settings = TrideSettings(steps=0)
    state: dict[str, Tensor] = {}
    assert [phase_of(make_step(state=state), settings) for _ in range(3)] == ["cap", "anp", "cap"]
    resumed = {name: value.clone() for name, value in state.items()}
    assert [phase_of(make_step(state=resumed), settings) for _ in range(2)] == ["anp", "cap"]


def test_two_trainings_do_not_disturb_each_other() -> None:
    settings, one, other = TrideSettings(steps=0), make_step(), make_step()
    assert [phase_of(step, settings) for step in (one, other, one, one, other)] == ["cap", "cap", "anp", "cap", "anp"]


def test_a_single_phase_stays() -> None:
    for phase in ("cap", "anp"):
        step = make_step()
        settings = TrideSettings(steps=0, phases=phase)
        assert [phase_of(step, settings) for _ in range(3)] == [phase] * 3


@pytest.mark.medium
def test_benign_batches_do_not_change_whose_turn_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    phases: list[tuple[str, bool]] = []

    def noting(step: Step, settings: TrideSettings) -> Any:
        anchors = bool(step.state.get("anchors_next", False))
        phases.append(("anp" if anchors else "cap", settings.eps == 0))
        yield from triplet_decoupling(step, settings)

    monkeypatch.setitem(DEFENCES, "tride", noting)
    fit(ah.dataset("digits"), tmp_path / "run", "catride", **SHORT, train={"epochs": 1, "benign": 0.5})
    perturbed = [phase for phase, benign in phases if not benign]
    assert 0 < len(perturbed) < len(phases)
    assert perturbed == [("cap", "anp")[i % 2] for i in range(len(perturbed))]


# Paper and code ---------------------------------------------------------------------------------------------


def test_the_window_narrows_as_each_form_has_it() -> None:
    paper, code = TrideSettings(), TrideSettings(form="code")
    first, last = (0, 75), (74, 75)
    assert window_at(paper, *first) == pytest.approx(0.2 * (1 - (1 / 150) ** 2))
    assert window_at(paper, *last) == pytest.approx(0.75 * 0.2)
    assert window_at(code, *first) == 0.2
    assert window_at(code, *last) == pytest.approx(0.2 * (1 - 74 / 150) ** 2)


def test_the_window_is_what_is_mined_in(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    mine = Step.mine

    def spy(step: Step, sampler: str, embeddings: Tensor, margin: float) -> Any:
        asked.append((sampler, margin))
        return mine(step, sampler, embeddings, margin)

    monkeypatch.setattr(Step, "mine", spy)
    step = replace(make_step(), epoch=3, epochs=4)
    run(step, TrideSettings(steps=0, window=0.4))
    assert asked == [("semihard", pytest.approx(0.3))]


@pytest.mark.parametrize("phase", ["cap", "anp"])
def test_the_progressive_step_begins_at_zero_in_the_code_alone(phase: Any) -> None:
    furthest = {}
    for form in ("paper", "code"):
        for progressive in (True, False):
            for epoch in (0, 3):
                step = replace(make_step(), epoch=epoch, epochs=4)
                settings = TrideSettings(
                    phases=phase,
                    form=form,
                    eps=0.5,
                    alpha=0.04,
                    steps=1,
                    progressive=progressive,
                )
                units = run(step, settings)[2]
                clean = run(step, replace(settings, steps=0))[2]
                furthest[form, progressive, epoch] = (units - clean).abs().max().item()
    for (form, progressive, epoch), found in furthest.items():
        n = epoch + (form == "paper")
        assert found == pytest.approx(0.04 * n / 4 if progressive else 0.04), (form, progressive, epoch)


def test_forms_differ_in_weights_in_where_the_top_rank_counts_and_in_when_enough_is_enough() -> None:
    p, n = distances()
    paper, code = TrideSettings(), TrideSettings(form="code")
    assert torch.equal(weighted_collapseness(paper, p, n), collapseness(p, n, 10.0))
    assert torch.equal(weighted_collapseness(code, p, n), collapseness(p, n, 10.0, far=True))
    step = make_step()
    still: dict[str, Any] = {"phases": "cap", "steps": 0, "beta": 0.9, "progressive": False}
    without, with_ = (run(step, TrideSettings(form="code", top_rank_loss=on, **still))[0] for on in (False, True))
    assert with_ > without
    assert torch.equal(*(run(step, TrideSettings(top_rank_loss=on, **still))[0] for on in (False, True)))
    small = torch.tensor([-1.0, 0.0, 5e-6, 2e-5], requires_grad=True)
    for settings, moving in ((paper, [0, 0, 1, 1]), (code, [0, 0, 0, 1]), (TrideSettings(stop=False), [1, 1, 1, 1])):
        (gradient,) = torch.autograd.grad(hinged(settings, small).sum(), small)
        assert gradient.tolist() == moving


def test_in_the_code_s_form_anp_never_raises_collapseness_for_its_own_sake() -> None:
    """With C < 0 and no top-rank term it has nothing to do; with it, only the nearest half and d(A, A_0) pull."""
    idle, images, clean, _ = attack("anp", TrideSettings(form="code", top_rank_term=False, **STRONG))
    assert collapse_of(clean, far=True) < 0 and torch.equal(idle.images, images[:, :1])
    busy, images, clean, after = attack("anp", TrideSettings(form="code", **STRONG))
    assert not torch.equal(busy.images, images[:, :1])
    assert nearest_part(euclidean(after[:, 0], after[:, 2])) < nearest_part(euclidean(clean[:, 0], clean[:, 2]))


# By name, and from settings ---------------------------------------------------------------------------------


def test_recipes_hold_the_paper_s_values_and_the_code_s_form() -> None:
    paper, code = (settings_from(name, {"data": {"name": "cub"}}).defence for name in ("catride", "catride-code"))
    assert paper == TrideSettings()
    assert (paper.steps, paper.eps, paper.alpha) == (16, 8 / 255, 1 / 255)
    assert (paper.margin, paper.attention, paper.gamma, paper.beta, paper.window) == (0.2, 10.0, 0.5, 0.04, 0.2)
    assert code == TrideSettings(form="code", weights_carry_gradient=True)
    digits = settings_from("catride", {"data": {"name": "digits"}}).defence
    assert (digits.eps, digits.alpha) == (77 / 255, 0.075)


@pytest.mark.parametrize(
    "row",
    [
        {"phases": "cap"},
        {"phases": "anp"},
        {"top_rank_term": False, "top_rank_loss": False},
        {"top_rank_loss": False},
        {**NAIVE, "phases": "cap"},
        {**NAIVE, "phases": "anp"},
        NAIVE,
        {"guide": "hardness", "progressive": False},
        {"form": "code", "weights_carry_gradient": True},
    ],
    ids=str,
)
def test_the_rows_of_the_paper_are_settings(row: dict[str, Any]) -> None:
    """Each trains, and none is CA-TRIDE: over three batches something else comes out."""
    results = []
    for change in ({}, row):
        step = replace(make_step(), epoch=1, epochs=3)
        settings = TrideSettings(**{"eps": 0.3, "alpha": 0.03, "steps": 12, "attention": 20.0, "beta": 0.6, **change})
        results.append([run(step, settings)[0].item() for _ in range(3)])
    assert all(map(math.isfinite, results[1])) and results[0] != results[1]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"attention": -1.0}, "attention"),
        ({"attention": math.inf}, "attention"),
        ({"attention": math.nan}, "attention"),
        ({"beta": -0.1}, "beta"),
        ({"gamma": -0.1}, "gamma"),
        ({"margin": -0.1}, "margin"),
        ({"window": 0.0}, "window"),
        ({"steps": -1}, "steps"),
        ({"phases": "capp"}, "did you mean cap"),
        ({"guide": "hardnes"}, "did you mean hardness"),
        ({"form": "papr"}, "did you mean paper"),
        ({"sampler": "semihart"}, "did you mean semihard"),
        ({"top_share": 0.0}, "top_share"),
        ({"top_share": 1.5}, "top_share"),
        ({"adaptive": -1.0}, "adaptive"),
        ({"ics": -0.5}, "ics"),
        ({"upper": 1.4}, "cut-offs of the distance sampler"),
        ({"own_positive": False}, "own_positive is of the softhard sampler"),
        ({"form": "code", "stop": False}, "use form = paper"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        TrideSettings(**wrong)


def test_ics_is_refused_where_no_anchor_moves() -> None:
    with pytest.raises(SettingsError, match=r"with phases = cap anchors stay clean"):
        settings_from("catride", {"defence": {"ics": "0.5", "phases": "cap"}})
    # In turns only the batches whose anchors move have it.
    terms: list[float] = []
    step = make_step(log=lambda name, value, _=1.0: terms.append(float(value)) if name == "ics" else None)
    for count in (0, 1, 1, 2):
        train(step, triplet_decoupling(step, TrideSettings(ics=0.5, **STRONG)))
        assert len(terms) == count


def test_training_on_digits(tmp_path: Path) -> None:
    digits = ah.dataset("digits")
    alone = fit(digits, tmp_path / "alone", "catride", **SHORT, train={"epochs": 1})
    row = alone.metrics()[-1]
    assert row["hardness_after"] > row["hardness_before"] and row["shift_all_cap"] > 0 and row["shift_all_anp"] > 0
    # Steps times the pairs of each batch, twice for candidates and once for anchors, unless the batch is stopped.
    most = sum(2 * min(128, 901 - 128 * i) * (1 + (i % 2 == 0)) for i in range(row["step"]))
    assert 0 < alone.read_json()["image_steps"] <= most
    # Whose turn it is does matter.
    cap = {**SHORT, "defence": {"steps": 2, "phases": "cap"}, "train": {"epochs": 1}}
    fit(digits, tmp_path / "cap", "catride", **cap)
    assert not same(tmp_path / "alone", tmp_path / "cap")
