"""EST, SES and REST: embeddings moved away from where they lay, and short runs of these and of HM on digits."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anchorhold as ah
from anchorhold.config.recipes import settings_from
from anchorhold.config.settings import DEFENCE_SETTINGS
from anchorhold.defences.est import SHIFTS, embedding_shifted, move_away, revised_embedding_shifted, suppressed_shift
from anchorhold.defences.menu import DEFENCES
from anchorhold.defences.natural import natural
from anchorhold.defences.settings import EstSettings, NaturalSettings, RestSettings, SesSettings
from anchorhold.defences.step import Step
from anchorhold.errors import SettingsError
from anchorhold.geometry import euclidean
from anchorhold.model.frozen import frozen
from anchorhold.perturb.ascend import ascend
from anchorhold.perturb.ball import Ball
from anchorhold.perturb.problem import Problem
from anchorhold.perturb.settings import Budget
from anchorhold.triplets import hardness
from tests.analytic import tanh_embedder
from tests.defences.test_hardness import KEY, make_step, spied, train

STRONG: dict[str, Any] = {"eps": 0.2, "alpha": 0.05, "steps": 4}  # eight-pixel images need more than 8/255
IMAGES = KEY("shifted").uniform(torch.arange(6), (1, 1, 3, 3))


def climbed(embed: Callable[[Tensor], Tensor], images: Tensor, eps: float, alpha: float, steps: int) -> Tensor:
    """The published attack as a plain loop: the sum of the coordinates first, then the Euclidean shift."""
    clean, x = embed(images).detach(), images
    for i in range(steps):
        x = x.detach().requires_grad_()
        e = embed(x)
        (gradient,) = torch.autograd.grad(e.sum() if i == 0 else (e - clean).norm(dim=1).sum(), x)
        x = torch.clamp(x + alpha * gradient.sign(), images - eps, images + eps).clamp(0, 1)
    return x.detach()


# The shift --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("start", ["zero", "random"])
@pytest.mark.parametrize("shift", SHIFTS)
def test_the_shift_is_climbed_from_any_start_in_any_ball(shift: str, start: Any, norm: Any) -> None:
    embed = tanh_embedder(9)
    clean = embed(IMAGES[:, 0])
    goal = move_away(clean, SHIFTS[shift])

    def reached(steps: int) -> Tensor:
        x = ascend(Problem(embed, goal, Ball(0.1, norm), Budget(steps, 0.03, start), KEY("start")), IMAGES).images
        r = (x - IMAGES).flatten(1)
        assert (r.norm(dim=1, p=torch.inf if norm == "linf" else 2) <= 0.1 + 1e-12).all()
        return SHIFTS[shift](embed(x[:, 0]), clean)

    first, last = reached(1), reached(8)
    assert (last > first).all() and (first > 1e-5).all()


@pytest.mark.parametrize("shift", SHIFTS)
def test_the_first_direction_is_the_gradient_of_the_sum(shift: str) -> None:
    embed = tanh_embedder(9)
    x = IMAGES.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(embed(x[:, 0]).sum(), x)
    moved = ascend(
        Problem(embed, move_away(embed(IMAGES[:, 0]), SHIFTS[shift]), Ball(1.0), Budget(1, 0.01)), IMAGES
    ).images
    assert torch.allclose(moved, (IMAGES + 0.01 * gradient.sign()).clamp(0, 1), atol=1e-12)


# EST --------------------------------------------------------------------------------------------------------


def test_est_is_the_loss_on_moved_images_mined_where_they_went() -> None:
    """Hardest negatives need no draw, so the plain loops below decide everything."""
    step = make_step()
    loss, gradients = train(step, embedding_shifted(step, EstSettings("hardest", **STRONG)))
    with step.frozen() as embed:
        moved = climbed(embed, step.batch.images, **STRONG)
        clean_e = embed(step.batch.images)
    e, labels = step.model(moved), step.batch.labels
    e_fixed = e.detach()
    total, elsewhere = torch.zeros((), dtype=torch.float64), 0
    for a in range(0, len(e), 2):
        others = [j for j in range(len(e)) if labels[j] != labels[a]]
        n = min(others, key=lambda j: float((e_fixed[a] - e_fixed[j]).norm()))
        elsewhere += n != min(others, key=lambda j: float((clean_e[a] - clean_e[j]).norm()))
        total = total + torch.relu(hardness(e[a], e[a + 1], e[n]) + 0.2) / (len(e) // 2)
    step.model.zero_grad()
    total.backward()
    assert elsewhere, "mining on clean embeddings would give the same"
    assert torch.allclose(loss, total, atol=1e-12)
    expected = [p.grad for p in step.model.parameters() if p.grad is not None]
    assert all(torch.allclose(g, want, atol=1e-10) for g, want in zip(gradients, expected, strict=True))


def test_est_settings_reach_the_attack() -> None:
    """the robust-init study A.7: a uniform random start, an L2 ball."""
    step = make_step()
    seen = spied(step)
    changes: tuple[dict[str, Any], ...] = ({}, {"start": "random"}, {"norm": "l2", "eps": 1.0, "alpha": 0.3})
    for change in changes:
        train(step, embedding_shifted(step, EstSettings(**(STRONG | change))))
        shift = seen[-1] - step.batch.images
        size = shift.flatten(1).norm(dim=1) if change.get("norm") else shift.abs()
        assert 0 < size.max() <= change.get("eps", 0.2) + 1e-12
    assert all(not torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])
    train(step, embedding_shifted(step, EstSettings(shift="cosine", **STRONG)))
    assert torch.allclose(seen[-1], seen[0], atol=1e-12)  # on the sphere 1 − cos = d²/2: the same way up


def test_est_logs_how_far_it_moved() -> None:
    logged: dict[str, float] = {}
    step = make_step(log=lambda name, value, weight=1.0: logged.update({name: float(value)}))
    train(step, embedding_shifted(step, EstSettings(**STRONG)))
    with step.frozen() as embed:
        clean, moved = embed(step.batch.images), embed(climbed(embed, step.batch.images, **STRONG))
    spread = torch.stack([(x - y).norm() for i, x in enumerate(clean) for j, y in enumerate(clean) if i != j]).mean()
    assert logged["shift_all"] == pytest.approx((moved - clean).norm(dim=1).mean().item() / spread.item(), rel=1e-3)
    assert logged["shift_overall_all"] == logged["shift_all"] and logged["image_steps"] == 4 * 12


# BatchNorm --------------------------------------------------------------------------------------------------


def with_batchnorm(freeze: bool) -> Step:
    step = make_step()
    step.model = ah.Embedder("test_resnet", 16, channels=1, size=8, freeze_batchnorm=freeze, seed=2).double()
    return step


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: b.clone() for name, b in model.named_buffers()}


def test_est_with_live_batchnorm_sees_clean_and_adversarial_batches_and_attacks_by_running_statistics() -> None:
    step = with_batchnorm(freeze=False)
    twin, before = copy.deepcopy(step.model), buffers(step.model)
    modes = [module.training for module in step.model.modules()]
    loss, _ = train(step, embedding_shifted(step, EstSettings(**STRONG)))
    assert [module.training for module in step.model.modules()] == modes
    twin(step.batch.images)  # in train mode: running statistics move
    with frozen(twin) as embed:
        moved = climbed(embed, step.batch.images, **STRONG)
    e = twin(moved)
    chosen = step.mine("random", e, 0.2)
    expected = torch.relu(hardness(e[chosen.anchor], e[chosen.positive], e[chosen.negative]) + 0.2).mean()
    assert torch.allclose(loss, expected, atol=1e-10)
    after, wanted = buffers(step.model), buffers(twin)
    assert all(torch.allclose(after[name].double(), wanted[name].double(), atol=1e-10) for name in after)
    counts = {name: int(b) for name, b in after.items() if name.endswith("num_batches_tracked")}
    assert counts and all(count == int(before[name]) + 2 for name, count in counts.items())


@pytest.mark.parametrize("name", ["est", "ses", "rest"])
def test_frozen_batchnorm_stays_and_modes_are_restored(name: str) -> None:
    step = with_batchnorm(freeze=True)
    seen, before = spied(step), buffers(step.model)
    modes = [module.training for module in step.model.modules()]
    assert True in modes and False in modes
    _, gradients = train(step, DEFENCES[name](step, DEFENCE_SETTINGS[name](**STRONG)))
    assert [module.training for module in step.model.modules()] == modes
    assert len(seen) == 1 and all(torch.equal(b, before[n]) for n, b in step.model.named_buffers())
    assert any(g.abs().max() > 0 for g in gradients)


@pytest.mark.parametrize("start", ["zero", "random"])
def test_l2_steps_as_the_equations_of_robust_init_print_them(start: Any) -> None:
    """x_0 = x + U(−ε, ε), x_k+1 = Π(x_k + α · sign(∇)), with the projection on the L2 ball (A.7, eqs. 6 and 7)."""
    step, eps, alpha = make_step(), 0.6, 0.05
    seen = spied(step)
    attack: dict[str, Any] = {"norm": "l2", "eps": eps, "alpha": alpha, "steps": 3, "start": start}
    train(step, embedding_shifted(step, EstSettings("hardest", signed=True, **attack)))
    x = step.batch.images

    def projected(moved: Tensor) -> Tensor:
        shift = (moved - x).flatten(1)
        return (x + (shift * (eps / shift.norm(dim=1, keepdim=True)).clamp(max=1)).view_as(x)).clamp(0, 1)

    with step.frozen() as embed:
        clean = embed(x).detach()
        moved = x.clone()
        if start == "random":
            box = 2 * step.key("start")("start", 0).uniform(torch.arange(len(x)), (1, *x.shape[1:]), x.dtype)[:, 0] - 1
            moved = projected(x + eps * box)
        for count in range(3):
            moved = moved.detach().requires_grad_()
            e = embed(moved)
            climbed = e.sum() if start == "zero" and count == 0 else euclidean(e, clean).sum()
            moved = projected(moved + alpha * torch.autograd.grad(climbed, moved)[0].sign())
    assert torch.allclose(seen[-1], moved, atol=1e-10)
    assert (seen[-1] - x).flatten(1).norm(dim=1).max() <= eps + 1e-9
    train(step, embedding_shifted(step, EstSettings("hardest", **attack)))
    assert not torch.allclose(seen[-1], moved, atol=1e-3)


@pytest.mark.parametrize("name", ["est", "ses", "est live"])
def test_the_structure_term_of_moved_anchors_is_added_by_its_weight(name: str) -> None:
    """λ · mean max(0, d(a, a') − d(a, p)) with gradient through all three; the rest is the defence without it."""
    live = name.endswith("live")
    step = with_batchnorm(freeze=False) if live else make_step()
    step.batch.images[1::2] = 0.9 * step.batch.images[0::2] + 0.1 * step.batch.images[1::2]  # near positives
    twin = copy.deepcopy(step)
    defence, kind = DEFENCES[name[:3]], DEFENCE_SETTINGS[name[:3]]
    loss, gradients = train(step, defence(step, kind("random", ics=0.7, **STRONG)))
    x, model = step.batch.images, copy.deepcopy(twin.model)
    plain, without = train(twin, defence(twin, kind("random", **STRONG)))
    clean = model(x)  # in training: with live BatchNorm this moves the running statistics that the attack sees
    with frozen(model) as embed:
        moved = climbed(embed, x, **STRONG)
    after = model(moved)
    a, there, p = clean[0::2], after[0::2], clean[1::2]  # a random triplet has the partner as its positive
    terms = (euclidean(a, there) - euclidean(a, p)).clamp(min=0)
    assert (terms > 0).any()
    (0.7 * terms.mean()).backward()
    assert torch.allclose(loss, plain + 0.7 * terms.mean(), atol=1e-10)
    term = [w.grad for w in model.parameters() if w.grad is not None]
    assert all(torch.allclose(g, u + t, atol=1e-9) for g, u, t in zip(gradients, without, term, strict=True))
    after_all, wanted = buffers(step.model), buffers(twin.model)  # no pass more than without the term
    assert all(torch.equal(after_all[each], wanted[each]) for each in wanted)


# SES and REST -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", ["euclidean", "cosine"])
def test_ses_adds_the_shift_with_gradient_through_both_sides(shift: Any) -> None:
    step = make_step()
    seen = spied(step)
    loss, gradients = train(step, suppressed_shift(step, SesSettings("softhard", shift=shift, weight=3.0, **STRONG)))
    with step.frozen() as embed:
        moved = climbed(embed, step.batch.images, **STRONG)
    assert len(seen) == 1 and torch.allclose(seen[0], torch.cat([step.batch.images, moved]), atol=1e-12)
    e, there = step.model(step.batch.images), step.model(moved)
    chosen = step.mine("softhard", e, 0.2)
    plain = torch.relu(hardness(e[chosen.anchor], e[chosen.positive], e[chosen.negative]) + 0.2).mean()
    total = plain + 3 * (euclidean(there, e) if shift == "euclidean" else 1 - (there * e).sum(1)).mean()
    step.model.zero_grad()
    total.backward()
    assert torch.allclose(loss, total, atol=1e-12) and loss > plain + 1e-3
    expected = [p.grad for p in step.model.parameters() if p.grad is not None]
    assert all(torch.allclose(g, want, atol=1e-10) for g, want in zip(gradients, expected, strict=True))


def test_rest_leaves_anchors_and_mines_on_clean_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    step, asked = make_step(), []
    seen, mine = spied(step), Step.mine

    def spy(self: Step, sampler: str, embeddings: Tensor, margin: float) -> Any:
        asked.append((embeddings, margin))
        return mine(self, sampler, embeddings, margin)

    monkeypatch.setattr(Step, "mine", spy)
    loss, _ = train(step, revised_embedding_shifted(step, RestSettings("semihard", **STRONG)))
    images = step.batch.images
    with step.frozen() as embed:
        clean = embed(images)
        ((mined_on, window),) = asked
        assert torch.allclose(mined_on, clean, atol=1e-12) and window == 1.0
        chosen = mine(step, "semihard", clean, 1.0)
        moved = [climbed(embed, images[j], **STRONG) for j in (chosen.positive, chosen.negative)]
    assert len(seen) == 1 and torch.equal(seen[0][:6], images[0::2])
    assert torch.allclose(seen[0][6:], torch.cat(moved), atol=1e-12)
    e = [step.model(x) for x in (images[chosen.anchor], *moved)]
    assert torch.allclose(loss, torch.relu(hardness(*e) + 0.2).mean(), atol=1e-12)


# What they share --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["zero", "random"])
@pytest.mark.parametrize("name", ["est", "ses", "rest"])
def test_a_benign_batch_is_natural_training(name: str, start: str) -> None:
    step = make_step()
    benign = train(step, DEFENCES[name](step, DEFENCE_SETTINGS[name]("softhard", eps=0.0, steps=0, start=start)))
    plain = train(step, natural(step, NaturalSettings("softhard")))
    # SES counts a shift of zero as 1e-6 in every coordinate, as distances here do: a constant.
    assert torch.allclose(benign[0], plain[0] + (4e-6 if name == "ses" else 0), atol=1e-12)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(benign[1], plain[1], strict=True))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: EstSettings("randon"), "did you mean random"),
        (lambda: EstSettings(shift="cosin"), "did you mean cosine"),  # type: ignore[arg-type]
        (lambda: EstSettings(margin=-0.1), "margin"),
        (lambda: EstSettings(eps=-0.1), "negative"),
        (lambda: SesSettings(weight=-1.0), "weight"),
        (lambda: SesSettings("randon"), "did you mean random"),
        (lambda: RestSettings(window=0.0), "window"),
        (lambda: EstSettings(ics=-0.5), r"ics \(λ\) .* at least 0"),
        (lambda: EstSettings(signed=True), "signed is for L2"),
        (lambda: EstSettings(upper=1.4), "cut-offs of the distance sampler"),
        (lambda: RestSettings(margin=-0.1), "margin"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Any, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        make()


def test_only_the_recipe_of_est_has_live_batchnorm() -> None:
    live = {name: not settings_from(name).model.freeze_batchnorm for name in ("est", "ses", "rest", "act", "hm-lga")}
    assert live == {"est": True, "ses": False, "rest": False, "act": False, "hm-lga": False}
    assert settings_from("est").defence == EstSettings() and settings_from("est").train.on_collapse == "stop"
    assert settings_from("ses").defence == SesSettings() and settings_from("rest").defence == RestSettings()


# Short runs -------------------------------------------------------------------------------------------------

SHORT: dict[str, Any] = {
    "train": {"epochs": 1, "checkpoint_seconds": 999},
    "batch": {"pairs": 64},
    "model": {"dim": 16},
}
BOOSTED = {"destination": "semihard", "boost": 0.1, "ics": 0.5, "steps": 3}


@pytest.fixture(scope="module")
def digits() -> ah.Dataset:
    return ah.dataset("digits")


@pytest.mark.medium
@pytest.mark.parametrize(
    ("recipe", "defence", "members"),
    [
        ("est", {}, 1),
        pytest.param("ses", {}, 1, marks=pytest.mark.slow),
        ("rest", {}, 2),
        pytest.param("hm-lga-ics", {}, 3, marks=pytest.mark.slow),
        ("hm-lga", BOOSTED, 3),
        pytest.param("minmax", {}, 3, marks=pytest.mark.slow),
    ],
)
def test_an_epoch_on_digits(recipe: str, defence: dict[str, Any], members: int, digits: Any, tmp_path: Path) -> None:
    run = ah.fit(None, digits, recipe, tmp_path / "run", overrides={**SHORT, "defence": defence}, device="cpu")
    (row,) = run.metrics()
    assert run.read_json()["status"] == "done" and 0 < row["loss"] < 3 and row["r1"] > 40
    for whose in ("all", "perturbed"):
        assert row[f"shift_overall_{whose}"] == pytest.approx(members * row[f"shift_{whose}"])
    # Only HM leaves triplets alone: those that are where they should be.
    least = row["shift_all"] / row["active_first"] if recipe.startswith("hm") else row["shift_all"]
    assert row["shift_perturbed"] == pytest.approx(least, rel=1e-3) and 0 < row["shift_all"] <= least
    assert row["ics"] > 0 if recipe.startswith("hm") else "ics" not in row
