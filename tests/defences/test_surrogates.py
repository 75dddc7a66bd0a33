"""ADML's surrogate losses (equations 7, 8), and the trainings over them (11, 12, 13), against loops from the paper."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorhold as ah
from anchorhold import losses
from anchorhold.defences.adml import all_at_once, loss_at_once
from anchorhold.defences.settings import AdmlSettings
from anchorhold.defences.step import Step
from anchorhold.errors import SettingsError
from tests.analytic import draw
from tests.defences.test_adml import close, mined, run
from tests.defences.test_hardness import make_step, train

LABELS = [0, 0, 1, 1, 2, 2, 0]  # a class of three
ROUGH: dict[str, Any] = {"eps": 0.2, "steps": 4, "start": "zero", "attack_rate": 1.0, "objective": "surrogate"}
LOSSES: list[dict[str, Any]] = [{"loss": "triplet", "margin": 0.4}, {"loss": "contrastive", "margin": 0.8}]


def d(x: Tensor, y: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x - y + 1e-6)


def plain(
    settings: AdmlSettings, z: Tensor, label: int, batch: Tensor, labels: list[int], own: int | None = None
) -> Tensor:
    """l̂(θ, (z, y), S), written out from equations 3, 4, 7 and 8; `own` is the place of z in S, where it is there."""
    total, alpha, n = torch.zeros((), dtype=torch.float64), settings.margin, len(labels)
    far = [torch.zeros((), dtype=torch.float64) if j == own else d(z, batch[j]) for j in range(n)]
    if settings.loss == "contrastive":
        for j in range(n):
            total = total + (far[j] if labels[j] == label else (alpha - far[j]).clamp(min=0))
        return total / n
    positive = [far[j] for j in range(n) if labels[j] == label]
    negative = [far[k] for k in range(n) if labels[k] != label]
    for p in positive:
        for q in negative:
            total = total + (p - q + alpha).clamp(min=0)
    return total / (len(positive) * len(negative))


def climbed(embed: Callable[[Tensor], Tensor], start: Tensor, goal: Callable[[Tensor], Tensor]) -> Tensor:
    """Four signed steps of 2ε/4 = 0.1 within 0.2 of `start`."""
    x = start.clone()
    for _ in range(4):
        (gradient,) = torch.autograd.grad(goal(embed(x.requires_grad_(True))), x)
        x = x.detach() + 0.1 * gradient.sign()
        x = torch.minimum(torch.maximum(x, start - 0.2), start + 0.2).clamp(0, 1)
    return x


def expected(step: Step, settings: AdmlSettings) -> tuple[Tensor, Tensor]:
    """The training loss and the perturbed images, image by image."""
    images, labels = step.batch.images, LABELS
    with step.frozen() as embed:
        clean = embed(images).detach()
        if settings.formulation == 1:
            z = climbed(
                embed, images, lambda e: sum(plain(settings, e[i], y, e, labels, i) for i, y in enumerate(labels))
            )  # type: ignore[arg-type, return-value]
        elif settings.formulation == 2:
            z = torch.cat([
                climbed(embed, images[i : i + 1], lambda e, y=y: plain(settings, e[0], y, clean, labels))  # type: ignore[misc]
                for i, y in enumerate(labels)
            ])  # fmt: skip
        else:
            z = torch.cat([_fled(embed, images[i : i + 1], clean[i]) for i in range(len(labels))])
    there, here = step.model(z), step.model(images)
    batch = there if settings.formulation == 1 else here
    inside = settings.formulation == 1
    terms = [plain(settings, there[i], y, batch, labels, i if inside else None) for i, y in enumerate(labels)]
    if settings.formulation == 3:
        terms = [term + settings.weight * d(there[i], here[i]) for i, term in enumerate(terms)]
    return torch.stack(terms).mean(), z


def _fled(embed: Callable[[Tensor], Tensor], image: Tensor, clean: Tensor) -> Tensor:
    """Away from its own clean embedding; the first step climbs the sum of the coordinates."""
    first = iter([True])
    return climbed(embed, image, lambda e: e.sum() if next(first, False) else d(e[0], clean))


@pytest.mark.parametrize("loss", LOSSES)
def test_the_surrogates_are_the_papers_sums(loss: dict[str, Any]) -> None:
    settings, e = AdmlSettings(**loss, objective="surrogate"), torch.nn.functional.normalize(draw(7, 3), dim=1)
    z, labels = e[:4] + 0.1 * draw(4, 3, name="z"), torch.tensor(LABELS)
    distances, same = torch.linalg.vector_norm(z[:, None] - e + 1e-6, dim=2), labels[:4, None] == labels
    of = {"triplet": losses.triplet_surrogate, "contrastive": losses.contrastive_surrogate}[loss["loss"]]
    wanted = torch.stack([plain(settings, z[i], LABELS[i], e, LABELS) for i in range(4)])
    assert torch.allclose(of(distances, same, settings.margin), wanted, atol=1e-14) and (wanted > 0).sum() >= 3
    assert torch.autograd.gradcheck(lambda x: of(x, same, settings.margin), distances.requires_grad_())
    one_class = of(distances.detach(), torch.ones_like(same), settings.margin)
    assert torch.equal(one_class, torch.zeros(4).double() if loss["loss"] == "triplet" else distances.mean(1))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("formulation", [1, 2, 3])
def test_a_step_is_what_the_plain_loop_makes_of_it(loss: dict[str, Any], formulation: int) -> None:
    step = make_step(labels=LABELS)
    settings = AdmlSettings(**ROUGH, **loss, formulation=formulation, weight=0.7)
    (found, gradients), seen = run(settings, step)
    wanted, z = expected(step, settings)
    at = 0 if formulation == 1 else len(LABELS)  # the clean batch comes first where it is needed
    assert torch.allclose(seen[at:], z, atol=1e-12) and len(seen) == at + len(LABELS)
    value, there = train(step, iter([wanted]))
    assert torch.allclose(found, value, atol=1e-12)
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(gradients, there, strict=True))
    (harmless, _), _ = run(replace(settings, attack_rate=0.0), step)
    assert found > harmless


def test_the_three_formulations_differ() -> None:
    step = make_step(labels=LABELS)
    found = [float(run(AdmlSettings(**ROUGH, formulation=each, weight=0.0), step)[0][0]) for each in (1, 2, 3)]
    assert len(set(found)) == 3 and found[1] > found[2]


@pytest.mark.parametrize("loss", LOSSES)
def test_without_attacks_all_are_the_surrogate_of_the_clean_batch(loss: dict[str, Any]) -> None:
    """Equation 9."""
    step = make_step(labels=LABELS)
    e = step.model(step.batch.images)
    settings = AdmlSettings(**loss, objective="surrogate", attack_rate=0.0)
    wanted = torch.stack([plain(settings, e[i], y, e, LABELS, i) for i, y in enumerate(LABELS)]).mean()
    clean = train(step, iter([wanted]))
    for formulation in (1, 2, 3):
        chosen = replace(settings, formulation=formulation)
        assert close(run(chosen, step)[0], clean)
        assert close(run(replace(chosen, eps=0.0, steps=0, attack_rate=1.0), step)[0], clean)


@pytest.mark.parametrize("formulation", [1, 2, 3])
def test_gamma_says_which_images_move(formulation: int) -> None:
    labels = [c for c in range(10) for _ in "ab"]
    logged: dict[str, float] = {}
    step = make_step(labels=labels, log=lambda name, value, _=1.0: logged.update({name: float(value)}))
    settings = AdmlSettings(eps=0.05, steps=2, attack_rate=0.4, objective="surrogate", formulation=formulation)
    _, seen = run(settings, step)
    images = step.batch.images
    hit = (step.key("attacked").uniform(2 * torch.arange(20)) < 0.4).nonzero().squeeze(1)
    after = images.index_copy(0, hit, seen[20:]) if formulation > 1 else seen
    moved = (after != images).flatten(1).any(1).nonzero().squeeze(1)
    assert torch.equal(moved, hit) and 0 < len(hit) < 20
    assert (after - images).abs().max() <= 0.05 + 1e-12
    assert logged["attacked"] == pytest.approx(len(hit) / 20) and logged["image_steps"] == 2 * len(hit)


# Equation 11 with its hinge, on mined tuples ------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["triplet", "contrastive"])
def test_the_hinged_loss_of_all_images_is_what_the_plain_loop_makes_of_it(loss: Any) -> None:
    step = make_step()
    settings = AdmlSettings(**(ROUGH | {"objective": "loss"}), loss=loss, margin=0.0, formulation=1)
    if loss == "contrastive":  # a margin that half of the pairs keep, so that the hinge shows
        clean, chosen = mined(step, settings)
        apart = torch.linalg.vector_norm(clean[chosen.anchor] - clean[chosen.negative], dim=1)
        settings = replace(settings, margin=float(apart.median()))
    images = step.batch.images
    _, chosen = mined(step, settings)
    tuples = list(zip(chosen.anchor.tolist(), chosen.positive.tolist(), chosen.negative.tolist()))

    def goal(e: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for a, p, n in tuples:
            if settings.loss == "triplet":
                total = total + (d(e[a], e[p]) - d(e[a], e[n]) + settings.margin).clamp(min=0)
            else:
                total = total + d(e[a], e[p]) + (settings.margin - d(e[a], e[n])).clamp(min=0)
        return total

    with step.frozen() as embed:
        z = climbed(embed, images, goal)
        wanted = goal(embed(z)) / (len(tuples) * (2 if settings.loss == "contrastive" else 1))
    (found, _), seen = run(settings, step)
    assert torch.allclose(seen[len(images) :], z, atol=1e-12) and torch.allclose(found, wanted, atol=1e-12)
    _, without = run(replace(settings, objective="distances"), step)
    assert not torch.equal(without, seen)


@pytest.mark.parametrize("loss", ["triplet", "contrastive"])
def test_the_hinged_loss_has_the_gradient_of_finite_differences(loss: str) -> None:
    pulled, pushed = torch.tensor([[0, 1], [2, 3], [1, 0]]), torch.tensor([[0, 2], [2, 0], [1, 3]])
    goal, e = loss_at_once(pulled, pushed, loss, 0.3), draw(4, 1, 5, name="e").requires_grad_()
    assert goal.coupled and torch.autograd.gradcheck(lambda x: goal.value(x, torch.arange(4)), e)


def test_a_triplet_without_loss_stays_where_it_is() -> None:
    """Its hinge has no gradient; the distances of `all_at_once` have one."""
    e = torch.tensor([[0.0, 0.0], [0.1, 0.0], [3.0, 0.0], [0.0, 5.0], [0.0, 5.1], [0.0, 5.2]]).double()[:, None]
    pulled, pushed = torch.tensor([[0, 1], [3, 4]]), torch.tensor([[0, 2], [3, 5]])
    (gradient,) = torch.autograd.grad(
        loss_at_once(pulled, pushed, "triplet", 0.2).value(e.requires_grad_(), torch.arange(6)), e
    )
    assert (gradient[:3] == 0).all() and (gradient[4:].abs().sum(2) > 0.9).all()
    (gradient,) = torch.autograd.grad(all_at_once(pulled, pushed).value(e, torch.arange(6)), e)
    assert (gradient[1:3].abs().sum(2) > 0.9).all()


# Settings and training ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"objective": "surogate"}, "did you mean surrogate"),
        ({"objective": "loss"}, "formulation 1"),
        ({"objective": "loss", "formulation": 3}, "formulation 1"),
        ({"objective": "surrogate", "perturb": "anchor"}, "perturb = anchor has no effect"),
        ({"objective": "surrogate", "sampler": "random"}, "sampler = random has no effect"),
        ({"objective": "surrogate", "upper": 0.0}, "upper"),
        ({"objective": "surrogate", "loss": "contrastive", "reduction": "active"}, "reduction"),
    ],
)
def test_settings_that_would_have_no_effect_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        AdmlSettings(**wrong)


@pytest.mark.medium
@pytest.mark.parametrize("formulation", [1, 2])
def test_a_short_training_on_digits(tmp_path: Any, formulation: int) -> None:
    changes = {"train.epochs": 2, "train.evaluate_every": 2, "model.dim": 16, "defence.steps": 2}
    changes |= {"defence.objective": "surrogate", "defence.formulation": formulation}
    rows = ah.fit(None, ah.dataset("digits"), "adml", tmp_path, overrides=changes, device="cpu").metrics()
    assert rows[-1]["loss"] < rows[0]["loss"] and rows[-1]["r1"] > 70 and 0.4 < rows[-1]["attacked"] < 0.6
