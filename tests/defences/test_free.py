"""Free adversarial training with hardness manipulation: each replay is a training step and a step of the attack."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from anchorhold.config.recipes import settings_from
from anchorhold.defences.free import free_hardness_manipulation
from anchorhold.defences.hardness import hardness_manipulation
from anchorhold.defences.natural import natural
from anchorhold.defences.settings import FreeSettings, HardnessSettings, NaturalSettings
from anchorhold.defences.step import Step
from anchorhold.errors import AnchorholdError, SettingsError
from tests.defences.test_hardness import make_step, train

RATE = 0.05
EPS, ALPHA = 0.1, 0.04


def replay(step: Step, settings: FreeSettings, rate: float = RATE) -> list[float]:
    """The losses of plain gradient descent on what is yielded, one step a loss."""
    found = []
    for loss in free_hardness_manipulation(step, settings):
        step.model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in step.model.parameters():
                p -= rate * p.grad
        found.append(loss.item())
    return found


def d(x: Tensor, y: Tensor) -> Tensor:
    return (x - y + 1e-6).square().sum(1).sqrt()


def by_hand(step: Step, settings: FreeSettings, goal: float | None, ics: float) -> tuple[list[float], Tensor, int]:
    """The same in plain lines; no goal is LGA. Also the images at the end, and how often an image was moved."""
    model, x = copy.deepcopy(step.model), step.batch.images
    with torch.no_grad():
        chosen = step.mine("softhard", model(x), 0.2)
    a, p, n = (x[index] for index in (chosen.anchor, chosen.positive, chosen.negative))
    clean = torch.stack([a, p, n])
    moved, previous, found, work = clean.clone(), 2.0, [], 0
    for turn in range(settings.steps):
        moved = moved.detach().requires_grad_()
        e = [model(view) for view in moved]
        h = d(e[0], e[1]) - d(e[0], e[2])
        loss = (h + 0.2).clamp(min=0).mean()
        wanted = -min(previous, 0.2) if goal is None else goal
        previous = loss.item()
        if ics:
            own = model(a)
            loss = loss + ics * (d(own, e[0]) - d(own, model(p))).clamp(min=0).mean()
        climbed = h.sum() if settings.reuse == "hardness" else loss
        (gradient,) = torch.autograd.grad(climbed, moved, retain_graph=True)
        weights = list(model.parameters())
        with torch.no_grad():
            for w, g in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                w -= RATE * g
            below = h < wanted
            if turn < settings.steps - 1:
                shift = (moved + ALPHA * gradient.sign() - clean).clamp(-EPS, EPS)
                still = below & (gradient != 0).any(4).any(3).any(2).any(0)
                work += 3 * int(still.sum())
                moved = torch.where(below[None, :, None, None, None], (clean + shift).clamp(0, 1), moved)
        found.append(loss.item())
    return found, moved, work


@pytest.mark.parametrize("ics", [0.0, 0.5])
@pytest.mark.parametrize("reuse", ["hardness", "loss"])
@pytest.mark.parametrize("destination", ["lga", -0.05, 1.0])
def test_replays_are_the_plain_loop(destination: Any, reuse: Any, ics: float) -> None:
    settings = FreeSettings("softhard", destination, eps=EPS, alpha=ALPHA, steps=4, reuse=reuse, ics=ics, start="zero")
    logged: dict[str, float] = {}
    step = make_step(log=lambda name, value, weight=1.0: logged.update({name: float(value)}))
    wanted, moved, work = by_hand(step, settings, None if destination == "lga" else destination, ics)
    assert replay(step, settings) == pytest.approx(wanted, abs=1e-10) and len(wanted) == 4
    assert logged["image_steps"] == work
    assert work > 0 or destination == "lga"
    assert moved.isfinite().all() and "hardness_after" in logged and logged["active_first"] <= 1


def test_what_was_reused_raises_hardness_in_the_ball_and_the_loss_leaves_easy_triplets() -> None:
    """With a rate of 0 the weights stay, so replays are the steps of hardness manipulation's own attack."""
    for norm, eps, alpha in (("linf", 0.1, 0.04), ("l2", 0.5, 0.2)):
        ball: Any = {"norm": norm, "eps": eps, "alpha": alpha}
        step = make_step()
        losses = replay(step, FreeSettings("random", 0.3, steps=5, **ball), rate=0.0)
        for count, loss in enumerate(losses):
            same, _ = train(step, hardness_manipulation(step, HardnessSettings("random", 0.3, steps=count, **ball)))
            assert same.item() == pytest.approx(loss, abs=1e-10)
        assert losses[-1] > losses[0] + 0.01
    # H of every triplet is far below −γ = −0.001, so there is no loss, and nothing to reuse.
    step = make_step(labels=[0, 0, 1, 1])
    step.batch.images[1::2] = step.batch.images[0::2]
    for reuse, moves in (("hardness", True), ("loss", False)):
        logged: dict[str, float] = {}
        step.log = lambda name, value, weight=1.0, kept=logged: kept.update({name: float(value)})  # type: ignore[misc]
        replay(step, FreeSettings("random", 0.5, margin=0.001, steps=2, reuse=reuse), rate=0.0)  # type: ignore[arg-type]
        assert (logged["image_steps"] > 0) == moves


def test_a_batch_may_begin_where_the_last_one_ended() -> None:
    settings = FreeSettings("softhard", 0.5, eps=EPS, alpha=ALPHA, steps=3, carry=True)
    state: dict[str, Tensor] = {}
    first = make_step(state=state)
    replay(first, settings, rate=0.0)
    kept = state["perturbation"].clone()
    assert kept.shape == (6, 3, 1, 8, 8) and 0 < kept.abs().max() <= EPS + 1e-12
    # All six triplets, then a short batch of two: its first replay is on its own triplets, moved as before.
    short = make_step(labels=[0, 0, 1, 1], state=state)
    with torch.no_grad():
        chosen = short.mine("softhard", short.model(short.batch.images), 0.2)
        triplets = torch.stack([chosen.anchor, chosen.positive, chosen.negative], 1)
        views = (short.batch.images[triplets] + kept[:2]).clamp(0, 1)
        a, p, n = (short.model(views[:, view]) for view in range(3))
        wanted = (d(a, p) - d(a, n) + 0.2).clamp(min=0).mean()
    losses = replay(short, settings, rate=0.0)
    assert losses[0] == pytest.approx(wanted.item(), abs=1e-10)
    assert torch.equal(state["perturbation"][2:], kept[2:]) and not torch.equal(state["perturbation"][:2], kept[:2])
    without: dict[str, Tensor] = {}
    replay(make_step(state=without), FreeSettings(steps=3), rate=0.0)
    assert set(without) == {"previous_loss"}


@pytest.mark.parametrize("members", ["candidates", "anchors", "turns"])
def test_only_the_chosen_members_move(members: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    step = make_step()
    embed = step.embed
    monkeypatch.setattr(Step, "embed", lambda self, views: seen.append(views.detach()) or embed(views))
    for turn in range(2):
        seen.clear()
        replay(step, FreeSettings("random", 0.5, eps=EPS, alpha=ALPHA, steps=2, members=members), rate=0.0)
        clean, after = (views.unflatten(0, (-1, 3)) for views in seen)
        moved = [(clean[:, view] != after[:, view]).any().item() for view in range(3)]
        anchors = members == "anchors" or (members == "turns" and turn == 1)
        assert moved == ([True, False, False] if anchors else [False, True, True])


def test_a_benign_batch_is_one_step_of_natural_training() -> None:
    step = make_step()
    benign = train(step, free_hardness_manipulation(step, FreeSettings(eps=0.0, steps=0, ics=0.5, carry=True)))
    plain = train(step, natural(step, NaturalSettings("softhard")))
    assert torch.allclose(benign[0], plain[0], atol=1e-12) and set(step.state) == {"previous_loss"}
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(benign[1], plain[1], strict=True))
    for more in ({}, {"start": "random"}, {"carry": True}):  # the destination is the source: nothing moves
        step = make_step()
        same = replay(step, FreeSettings("softhard", "softhard", steps=3, **more), rate=0.0)  # type: ignore[arg-type]
        assert same == pytest.approx([plain[0].item()] * 3, abs=1e-12) and set(step.state) == {"previous_loss"}


def test_a_random_start_is_that_of_the_step() -> None:
    losses = [replay(make_step(), FreeSettings("random", 0.5, eps=EPS, steps=1, start="random")) for _ in range(2)]
    clean, _ = train(step := make_step(), natural(step, NaturalSettings("random")))
    assert losses[0] == losses[1] and abs(losses[0][0] - clean.item()) > 1e-4


def test_the_recipe_and_what_is_refused() -> None:
    settings = settings_from("hm-free")
    assert settings.defence == FreeSettings() and settings.train.epochs == 19 and settings.defence.steps == 4
    with pytest.raises(SettingsError, match="a batch is not replayed"):
        FreeSettings(steps=1)
    with pytest.raises(SettingsError, match="did you mean hardness"):
        FreeSettings(reuse="hardnes")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"did you mean defence\.steps"):
        settings_from("hm-free", {"defence": {"replays": 4}})
    with pytest.raises(AnchorholdError, match="backward"):
        list(free_hardness_manipulation(make_step(), FreeSettings(reuse="loss", destination=1.0)))
