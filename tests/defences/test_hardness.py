"""Hardness manipulation (LGA, g_B, ICS) and natural training, and where the two are the same."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from anchorhold.config.recipes import parse_assignments, settings_from
from anchorhold.config.settings import DEFENCE_SETTINGS
from anchorhold.defences import hardness as module
from anchorhold.defences.hardness import hardness_manipulation, intra_class, lga
from anchorhold.defences.menu import DEFENCES
from anchorhold.defences.natural import natural
from anchorhold.defences.proxy import Proxies
from anchorhold.defences.settings import HardnessSettings, NaturalSettings
from anchorhold.defences.step import Batch, Step
from anchorhold.errors import SettingsError
from anchorhold.geometry import euclidean
from anchorhold.model.embedder import Embedder
from anchorhold.random import Key
from anchorhold.triplets import SAMPLERS, hardness

KEY = Key.of(3)


def make_step(labels: list[int] | None = None, state: dict[str, Tensor] | None = None, **changes: Any) -> Step:
    labels = labels or [0, 0, 1, 1, 2, 2, 0, 0, 3, 3, 1, 1]
    ids = torch.arange(len(labels))
    model = Embedder("small", dim=16, channels=1, size=8, seed=1).double()
    batch = Batch(KEY("images").uniform(ids, (1, 8, 8)), torch.tensor(labels), ids)
    fixed: dict[str, Any] = {"model": model, "batch": batch, "epoch": 0, "epochs": 1, "key": KEY("step")}
    return Step(**fixed, state={} if state is None else state, **changes)


def train(step: Step, losses: Iterator[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The loss and the gradients of one step."""
    (loss,) = losses
    step.model.zero_grad()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in step.model.parameters() if p.grad is not None]


@pytest.mark.parametrize("ics", [0.0, 0.5])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_destination_equal_to_the_source_is_natural_training(sampler: str, ics: float) -> None:
    """Also with ICS: an anchor that did not move is nearer to itself than to any positive."""
    step = make_step()
    robust = train(step, hardness_manipulation(step, HardnessSettings(sampler, sampler, ics=ics)))
    plain = train(step, natural(step, NaturalSettings(sampler)))
    assert torch.allclose(robust[0], plain[0], atol=1e-12)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(robust[1], plain[1]))
    assert any(g.abs().max() > 0 for g in plain[1])


def test_destination_two_is_min_max() -> None:
    """HM[S, 2] climbs H without ever stopping: the plain loop of min-max training gives the same images."""
    step = make_step()
    settings = HardnessSettings("softhard", 2.0, eps=0.1, alpha=0.03, steps=4)
    loss, _ = train(step, hardness_manipulation(step, settings))
    with step.frozen() as embed:
        clean = embed(step.batch.images)
        chosen = step.mine("softhard", clean, 0.2)
        originals = torch.stack([step.batch.images[i] for i in (chosen.anchor, chosen.positive, chosen.negative)])
        moved = originals.clone()
        for _ in range(4):
            moved.requires_grad_(True)
            a, p, n = (embed(view) for view in moved)
            (gradient,) = torch.autograd.grad(hardness(a, p, n).sum(), moved)
            moved = moved.detach() + 0.03 * gradient.sign()
            moved = torch.minimum(torch.maximum(moved, originals - 0.1), originals + 0.1).clamp(0, 1)
        expected = torch.relu(hardness(*(embed(view) for view in moved)) + 0.2).mean()
    assert torch.allclose(loss, expected, atol=1e-12)


@pytest.mark.parametrize("destination", ["lga", "softhard", "hardest", 0.0])
def test_the_perturbation_raises_hardness_to_its_destination(destination: str | float) -> None:
    logged: dict[str, float] = {}
    # After a loss of 0 LGA asks for hardness 0, which the triplets of an untrained net lie around.
    state = {"previous_loss": torch.zeros((), dtype=torch.float64)}
    step = make_step(state=state, log=lambda name, value, weight=1.0: logged.update({name: float(value)}))
    train(step, hardness_manipulation(step, HardnessSettings("random", destination, eps=0.2, alpha=0.02, steps=10)))
    assert logged["hardness_after"] > logged["hardness_before"]
    assert 0 < logged["active_first"] <= 1 and logged["active_last"] <= logged["active_first"]
    assert logged["image_steps"] > 0


@pytest.mark.parametrize("margin", [0.2, 0.5])
def test_lga_never_asks_for_less_than_minus_the_margin(margin: float) -> None:
    loss = torch.tensor([0.0, margin / 4, margin, 1.01 * margin, 2.0, 100.0])
    assert lga(loss, margin).tolist() == pytest.approx([0, -margin / 4, -margin, -margin, -margin, -margin])


def test_lga_follows_the_previous_loss_and_two_trainings_do_not_share_it() -> None:
    harder: dict[str, Tensor] = {"previous_loss": torch.tensor(0.0, dtype=torch.float64)}
    gentle: dict[str, Tensor] = {}
    results = []
    for state in (gentle, harder):
        logged: dict[str, float] = {}
        step = make_step(state=state, log=lambda name, value, _=1.0, kept=logged: kept.update({name: float(value)}))
        loss, _ = train(step, hardness_manipulation(step, HardnessSettings(eps=0.3, alpha=0.02, steps=20)))
        results.append(logged["hardness_after"])
        assert state["previous_loss"] == loss
    assert results[1] > results[0]  # a lower loss asks for harder triplets
    assert gentle["previous_loss"] != harder["previous_loss"]


# The gradual boost ------------------------------------------------------------------------------------------


def destinations(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Every H_D that is asked for from now on."""
    asked: list[Tensor] = []
    ask = module.raise_hardness

    def spy(destination: Tensor, *rest: Any) -> Any:
        asked.append(destination)
        return ask(destination, *rest)

    monkeypatch.setattr(module, "raise_hardness", spy)
    return asked


@pytest.mark.parametrize("destination", [-0.1, 0, "hardest", "random"])
@pytest.mark.parametrize(
    ("previous", "raised"), [(None, 0.0), (0.7, 0.0), (0.2, 0.0), (0.15, 0.025), (0.05, 0.075), (0.0, 0.1)]
)
def test_the_boost_grows_as_the_loss_falls(
    destination: float | str, previous: float | None, raised: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """g_B(H_D) = H_D + ξ(1 − min(u, ℓ)/u) at ξ = 0.1 and u = 0.2; over the source's own sampler H_D is H_S."""
    state = {} if previous is None else {"previous_loss": torch.tensor(previous)}
    step, asked = make_step(state=state), destinations(monkeypatch)
    train(step, hardness_manipulation(step, HardnessSettings("random", destination, boost=0.1, steps=1)))
    with step.frozen() as embed:
        clean = embed(step.batch.images)
    if isinstance(destination, str):
        purpose = "source" if destination == "random" else "destination"
        other = step.mine(destination, clean, 0.2, purpose)
        expected = hardness(clean[other.anchor], clean[other.positive], clean[other.negative])
    else:
        expected = torch.full((6,), destination, dtype=torch.float64)
    assert torch.allclose(asked[0], expected + raised, atol=1e-8)


def test_a_boost_over_the_source_raises_it() -> None:
    """HM[S, g_B(S)] is natural training at first and adversarial once the loss has fallen."""
    settings = HardnessSettings("random", "random", boost=0.1, eps=0.2, alpha=0.02)
    first, later = make_step(), make_step(state={"previous_loss": torch.zeros(())})
    plain, _ = train(first, natural(first, NaturalSettings("random")))
    assert torch.allclose(train(first, hardness_manipulation(first, settings))[0], plain, atol=1e-12)
    loss, _ = train(later, hardness_manipulation(later, settings))
    assert plain + 0.09 < loss < plain + 0.2


# Intra-class structure --------------------------------------------------------------------------------------


def test_intra_class_structure_and_its_gradient_in_closed_form() -> None:
    """On the circle d = 2 sin(θ/2): a' at 90° and p at 60° pay √2 − 1; a' nearer than p pays nothing."""
    angles = torch.tensor([[0.0, 90.0, 60.0], [0.0, 30.0, 60.0]], dtype=torch.float64).deg2rad()
    points = torch.stack([angles.cos(), angles.sin()], dim=-1).requires_grad_()
    value = intra_class(*points.unbind(1))
    assert value.item() == pytest.approx((math.sqrt(2) - 1) / 2, abs=1e-5)
    (gradient,) = torch.autograd.grad(value, points)
    away, from_p = torch.tensor([-1.0, 1.0]) / math.sqrt(2), torch.tensor([-0.5, math.sqrt(0.75)])  # from a to a', to p
    expected = torch.stack([from_p - away, away, -from_p]).double() / 2  # a mean of two
    assert torch.allclose(gradient[0], expected, atol=1e-5)
    assert not gradient[1].any()


def spied(step: Step) -> list[Tensor]:
    """What goes through the model for training, call by call."""
    seen: list[Tensor] = []
    embed = step.embed
    step.embed = lambda images: seen.append(images) or embed(images)  # type: ignore[func-returns-value, method-assign]
    return seen


@pytest.mark.parametrize("sampler", ["softhard", "random"])
def test_the_term_is_added_by_its_weight_with_gradient_through_all_it_compares(sampler: str) -> None:
    step = make_step()
    seen = spied(step)
    # So strong that anchors move farther than their positives lie.
    strong: dict[str, Any] = {"destination": 2.0, "eps": 0.5, "alpha": 0.1}
    without, _ = train(step, hardness_manipulation(step, HardnessSettings(sampler, **strong)))
    loss, gradients = train(step, hardness_manipulation(step, HardnessSettings(sampler, ics=0.7, **strong)))
    moved, both = seen
    assert len(seen) == 2 and len(both) == 5 * 6  # one call a step: three adversarial views, two clean ones
    with step.frozen() as embed:
        chosen = step.mine(sampler, embed(step.batch.images), 0.2)
    e = step.model(moved).unflatten(0, (-1, 3))
    total, active = torch.relu(hardness(*e.unbind(1)) + 0.2).mean(), 0
    for i in range(6):
        anchor, positive = (step.model(step.batch.images[j[i], None])[0] for j in (chosen.anchor, chosen.positive))
        gap = euclidean(anchor, e[i, 0]) - euclidean(anchor, positive)
        if gap > 0:
            total, active = total + 0.7 * gap / 6, active + 1
    step.model.zero_grad()
    total.backward()
    assert active >= 2 and loss > without + 1e-2
    assert torch.allclose(loss, total, atol=1e-12)
    expected = [p.grad for p in step.model.parameters() if p.grad is not None]
    assert all(torch.allclose(g, want, atol=1e-10) for g, want in zip(gradients, expected, strict=True))
    assert torch.allclose(step.state["previous_loss"], without, atol=1e-12)  # LGA and g_B follow the triplet loss alone


def test_an_anchor_that_is_its_own_positive_pays_its_whole_shift() -> None:
    """Softhard may draw (a, a, n); then d(a, p) is 0, as the formula says."""
    a, moved, n = KEY("points").normal(torch.arange(3), (1, 8))
    assert intra_class(a, moved, a) == pytest.approx(euclidean(a, moved).item(), abs=1e-5)
    assert intra_class(a, a, a) == 0 and intra_class(a, moved, n) != intra_class(a, moved, a)


# Beyond the papers: a destination relative to the source, and some of the members -----------------------------


def test_a_destination_relative_to_the_source_attacks_every_triplet() -> None:
    """Whatever the loss was: g_B over the source leaves a batch alone after a loss of γ or more."""
    for previous in (0.0, 0.1, 2.0):
        logged: dict[str, float] = {}
        state = {"previous_loss": torch.tensor(previous)}
        step = make_step(state=state, log=lambda name, value, _=1.0, kept=logged: kept.update({name: float(value)}))
        settings = HardnessSettings("softhard", "softhard", rise=0.05, eps=0.3, alpha=0.02, steps=20)
        train(step, hardness_manipulation(step, settings))
        assert logged["active_first"] == 1 and logged["active_last"] < 1
        assert logged["hardness_before"] + 0.05 <= logged["hardness_after"] + 1e-6 < logged["hardness_before"] + 0.2


def chosen_images(step: Step) -> Tensor:
    with step.frozen() as embed:
        chosen = step.mine("softhard", embed(step.batch.images), 0.2)
    return step.batch.images[torch.stack([chosen.anchor, chosen.positive, chosen.negative], dim=1)]


@pytest.mark.parametrize("destination", [1.5, 0.05, 0.01])  # no triplet gets there; some do, and leave; some are there
@pytest.mark.parametrize(("members", "places"), [("all", [0, 1, 2]), ("candidates", [1, 2]), ("anchors", [0])])
def test_only_the_chosen_members_climb_and_the_others_are_those_of_the_batch(
    members: Any, places: list[int], destination: float
) -> None:
    logged: dict[str, float] = {}
    step = make_step(log=lambda name, value, weight=1.0: logged.update({name: float(value)}))
    seen = spied(step)
    settings = HardnessSettings("softhard", destination, eps=0.1, alpha=0.03, steps=4, members=members)
    train(step, hardness_manipulation(step, settings))
    start = chosen_images(step)
    images, moving = start.clone(), torch.zeros(3, dtype=torch.float64)
    moving[places] = 1
    for _ in range(4):
        images.requires_grad_()
        e = step.model(images.flatten(0, 1)).unflatten(0, (-1, 3))
        loss = (destination - hardness(*e.unbind(1))).clamp(min=0).square().sum()
        step_by = -0.03 * torch.autograd.grad(loss, images)[0].sign() * moving[:, None, None, None]
        images = (start + (images.detach() + step_by - start).clamp(-0.1, 0.1)).clamp(0, 1)
    assert torch.allclose(seen[0].unflatten(0, (-1, 3)), images, atol=1e-9)
    most = 4 * 6 * len(places)
    assert logged["image_steps"] == most if destination == 1.5 else len(places) <= logged["image_steps"] < most
    with torch.no_grad():
        clean, after = (step.model(x[:, places].flatten(0, 1)) for x in (start, images))
        batch = step.model(step.batch.images)
        spread = torch.cdist(batch, batch).sum() / (len(batch) * (len(batch) - 1))
    shift = euclidean(clean, after).unflatten(0, (-1, len(places))).mean(1) / spread
    touched = (images != start).flatten(1).any(1)
    assert logged["shift_all"] == pytest.approx(float(shift.mean()), rel=1e-4)
    assert logged["shift_perturbed"] == pytest.approx(float(shift[touched].mean()), rel=1e-4)
    assert 0 < touched.sum() < len(touched) if destination == 0.01 else touched.all()
    for whose in ("all", "perturbed"):
        assert logged[f"shift_overall_{whose}"] == pytest.approx(len(places) * logged[f"shift_{whose}"])


def test_members_take_turns_each_with_its_own_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates first. What is remembered is in the state, so in the checkpoint."""
    state: dict[str, Tensor] = {}
    moved, losses = [], []
    seen: list[Tensor] = []
    embed = Step.embed
    monkeypatch.setattr(Step, "embed", lambda step, images: seen.append(images) or embed(step, images))
    for _ in range(3):
        logged: dict[str, float] = {}
        step = make_step(state=state, log=lambda name, value, _=1.0, kept=logged: kept.update({name: float(value)}))
        settings = HardnessSettings("softhard", 1.5, eps=0.1, alpha=0.03, steps=2, members="turns")
        losses.append(train(step, hardness_manipulation(step, settings))[0])
        start, after = chosen_images(step), seen[-1].unflatten(0, (-1, 3))
        moved.append([i for i in range(3) if not torch.equal(after[:, i], start[:, i])])
        whose = "anchors" if len(moved) == 2 else "candidates"
        for mean in ("shift_all", "shift_perturbed"):
            assert logged[f"{mean}_{whose}"] == logged[mean] > 0.01
            assert f"{mean}_{'candidates' if whose == 'anchors' else 'anchors'}" not in logged
    assert moved == [[1, 2], [0], [1, 2]] and bool(state["anchors_next"])
    assert (state["previous_loss_candidates"], state["previous_loss_anchors"]) == (losses[2], losses[1])


def test_each_turn_follows_its_own_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = destinations(monkeypatch)
    state = {"previous_loss_candidates": torch.tensor(0.05), "previous_loss_anchors": torch.tensor(0.15)}
    for _ in range(2):
        step = make_step(state=dict(state))
        step.state["anchors_next"] = torch.tensor(len(asked) == 1)
        train(step, hardness_manipulation(step, HardnessSettings(members="turns", steps=1)))
    assert [float(goal[0]) for goal in asked] == pytest.approx([-0.05, -0.15])


# All of it --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_pair_of_the_papers_tables_is_a_matter_of_settings() -> None:
    """Tables 2 to 5: any source; any sampler, constant, g_B over these, or LGA; each with and without ICS."""
    step = make_step(state={"previous_loss": torch.tensor(0.1)})
    ends = [(end, boost) for end in (*SAMPLERS, "0", "-0.1", "-1/5", "2") for boost in ("0", "0.1")] + [("lga", "0")]
    for source, (end, boost) in itertools.product(SAMPLERS, ends):
        asked = [f"defence.source={source}", f"defence.destination={end}", f"defence.boost={boost}", "defence.steps=2"]
        losses = []
        for ics in ("0", "0.5"):
            settings = settings_from("hm-lga", parse_assignments([*asked, f"defence.ics={ics}"])).defence
            step.state["previous_loss"] = torch.tensor(0.1)
            losses.append(train(step, hardness_manipulation(step, settings))[0])
        plain, _ = train(step, natural(step, NaturalSettings(source)))
        assert plain - 1e-12 <= losses[0] <= losses[1] + 1e-12, (source, end, boost)


@pytest.mark.parametrize("start", ["zero", "random"])
@pytest.mark.parametrize("destination", ["lga", 0.0])
def test_a_benign_batch_is_natural_training(destination: float | str, start: Any) -> None:
    step = make_step(state={"previous_loss": torch.zeros(())})
    settings = HardnessSettings("softhard", destination, ics=0.5, eps=0.0, steps=0, start=start)
    benign = train(step, hardness_manipulation(step, settings))
    plain = train(step, natural(step, NaturalSettings("softhard")))
    assert torch.allclose(benign[0], plain[0], atol=1e-12)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(benign[1], plain[1], strict=True))


def test_recipes_of_this_defence() -> None:
    for name, settings in (("hm-lga-ics", HardnessSettings(ics=0.5)), ("minmax", HardnessSettings(destination=2.0))):
        assert settings_from(name).defence == settings
        assert settings_from(name).train.on_collapse == "stop"


@pytest.mark.parametrize("name", DEFENCES)
def test_a_batch_of_one_class_is_no_reason_to_fail(name: str) -> None:
    step = make_step(labels=[4] * 8)
    if name == "proxy":  # its proxies train beside the model
        like = torch.zeros(1, 16, dtype=torch.float64)
        step = replace(step, companion=Proxies(like, torch.tensor([1, 4, 7]), KEY))
    for loss in DEFENCES[name](step, DEFENCE_SETTINGS[name]()):
        loss.backward()
        assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in step.model.parameters())


def test_source_and_destination_are_drawn_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Semihard falls back to random negatives in this batch, so with one key it would mostly repeat the source."""
    drawn: list[Tensor] = []
    mine = Step.mine

    def spy(step: Step, sampler: str, *rest: Any, **more: Any) -> Any:
        drawn.append((found := mine(step, "random", *rest, **more)).negative)
        return found

    monkeypatch.setattr(Step, "mine", spy)
    step = make_step(labels=[c for c in range(12) for _ in "ab"])
    train(step, hardness_manipulation(step, HardnessSettings("softhard", "semihard", steps=0)))
    assert len(drawn) == 2 and not torch.equal(*drawn)


@pytest.mark.parametrize("ends", [("distance", "random"), ("random", "distance"), ("softhard", "distance")])
def test_cut_offs_and_roth_s_positives_reach_source_and_destination(
    ends: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, Any]] = []
    mine = Step.mine

    def spy(step: Step, sampler: str, *rest: Any, **more: Any) -> Any:
        asked.append((sampler, more))
        return mine(step, sampler, *rest, **more)

    monkeypatch.setattr(Step, "mine", spy)
    step, soft = make_step(), "softhard" in ends
    cuts: dict[str, Any] = {"lower": 0.05, "upper": 0.5} | ({"own_positive": False} if soft else {})
    train(step, hardness_manipulation(step, HardnessSettings(*ends, steps=1, **cuts)))
    assert asked == [(end, cuts) for end in ends]
    train(step, hardness_manipulation(step, HardnessSettings(*ends, steps=1)))
    assert [more for _, more in asked[2:]] == [{}, {}]  # as ever


def test_cut_offs_change_what_the_distance_sampler_draws() -> None:
    """Without them mostly the nearest negative is drawn, in 16 dimensions; with `lower` above all of them, any."""
    step = make_step(labels=[c for c in range(20) for _ in "ab"])
    with step.frozen() as embed:
        e = embed(step.batch.images)
    apart = torch.cdist(e, e)
    apart[step.batch.labels[:, None] == step.batch.labels] = torch.inf
    shares = []
    for lower in (None, 1.9):
        found = step.mine("distance", e, 0.2, lower=lower)
        shares.append((found.negative == apart[found.anchor].argmin(1)).double().mean().item())
    assert shares[0] > 0.5 and shares[1] < 0.3


def test_mining_stays_inside_its_groups() -> None:
    step = make_step(mining_pairs=2)
    with step.frozen() as embed:
        chosen = step.mine("hardest", embed(step.batch.images), 0.2)
    assert torch.equal(chosen.anchor // 4, chosen.negative // 4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: HardnessSettings("softhrad"), "did you mean softhard"),
        (lambda: HardnessSettings(destination="lgo"), "did you mean lga"),
        (lambda: HardnessSettings(destination=2.5), r"\[-2, 2\]"),
        (lambda: HardnessSettings(steps=-1), "negative"),
        (lambda: HardnessSettings(margin=0.0), "margin"),
        (lambda: HardnessSettings(ics=-0.5), r"ics \(λ\) .* at least 0, got -0.5"),
        (lambda: HardnessSettings(ics=math.nan), "ics"),
        (lambda: HardnessSettings(destination=0.0, boost=-0.1), "boost .* at least 0"),
        (lambda: HardnessSettings(boost=0.1), "raises a fixed destination, and lga is gradual already"),
        (lambda: HardnessSettings(members="anchor"), "did you mean anchors"),  # type: ignore[arg-type]
        (lambda: HardnessSettings(ics=0.5, members="candidates"), "ICS needs an adversarial anchor in every batch"),
        (lambda: HardnessSettings(ics=0.5, members="turns"), "ICS needs an adversarial anchor in every batch"),
        (lambda: HardnessSettings(destination="softhard", members="turns"), "members = turns has no effect"),
        (lambda: HardnessSettings(rise=0.3), "set destination to a sampler"),
        (lambda: HardnessSettings(destination="hardest", rise=-0.1), r"rise .* in \[0, 4\], got -0.1"),
        (lambda: NaturalSettings("semihart"), "did you mean semihard"),
        (lambda: HardnessSettings(lower=0.5), "cut-offs of the distance sampler: choose it"),
        (lambda: HardnessSettings("distance", lower=1.4, upper=0.5), "upper must be larger"),
        (lambda: HardnessSettings("random", own_positive=False), "own_positive is of the softhard sampler"),
        (lambda: NaturalSettings(upper=1.4), "cut-offs of the distance sampler"),
        (lambda: NaturalSettings(loss="triplett"), "did you mean triplet"),
        (lambda: NaturalSettings(margin=-0.1), "margin"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Any, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        make()


def test_contrastive_training_uses_its_loss() -> None:
    step = make_step()
    loss, _ = train(step, natural(step, NaturalSettings(loss="contrastive", margin=1.0)))
    triplet, _ = train(step, natural(step, NaturalSettings()))
    assert loss > 0 and not torch.allclose(loss, triplet)


@pytest.mark.parametrize(
    ("recipe", "assignment", "words"),
    [
        ("act", "defence.ics=0.5", "leave out defence.ics with defence.name=act: ICS needs an adversarial anchor"),
        ("rest", "defence.ics=0.5", "with defence.name=rest: ICS needs an adversarial anchor"),
        ("natural", "defence.ics=0.5", "with defence.name=natural: ICS needs an adversarial anchor"),
        ("hm-lga-ics", "defence.name=act", "with defence.name=act: ICS needs an adversarial anchor"),
        ("act", "defence.boost=0.1", "with defence.name=act: g_B raises a destination hardness"),
        ("est", "defence.boost=0.1", "with defence.name=est: g_B raises a destination hardness"),
        ("hm-lga", "defence.boost=0.1", "raises a fixed destination"),
        ("hm-lga", "defence.ics=-0.5", "at least 0"),
        ("act", "defence.icsx=0.5", "no setting defence.icsx"),
    ],
)
def test_what_makes_no_sense_elsewhere_is_refused_with_the_reason(recipe: str, assignment: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        settings_from(recipe, parse_assignments([assignment]))
