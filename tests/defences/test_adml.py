"""Adversarial deep metric learning: who moves, whither, how often, and what is trained on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorhold as ah
from anchorhold import losses
from anchorhold.config.recipes import settings_from
from anchorhold.data.batches import class_batches
from anchorhold.defences.adml import adversarial_metric_learning, all_at_once, worst_case
from anchorhold.defences.settings import AdmlSettings
from anchorhold.defences.step import Step
from anchorhold.errors import SettingsError
from anchorhold.geometry import euclidean
from anchorhold.perturb.ascend import ascend
from anchorhold.perturb.ball import Ball
from anchorhold.perturb.problem import Problem
from anchorhold.perturb.settings import Budget
from anchorhold.reproduce.rows import row_named, row_settings
from anchorhold.triplets import Triplets
from tests.analytic import linear_embedder, tanh_embedder
from tests.defences.test_hardness import KEY, make_step, train

Result = tuple[Tensor, list[Tensor]]
ROUGH: dict[str, Any] = {"eps": 0.2, "steps": 4, "start": "zero"}  # far enough that every perturbation shows
EVERY = [{"perturb": name, "formulation": 2} for name in ("positive", "negative", "anchor")]
EVERY += [{"formulation": 1}, {"formulation": 3}, {"formulation": 3, "perturb": "anchor"}]


def run(settings: AdmlSettings, step: Step | None = None) -> tuple[Result, Tensor]:
    """Loss and gradients of one step, and the images that the model was trained on."""
    step = step or make_step()
    seen: list[Tensor] = []
    embed = step.embed
    step.embed = lambda images: seen.append(images) or embed(images)  # type: ignore[func-returns-value, method-assign]
    return train(step, adversarial_metric_learning(step, settings)), seen[0]


def mined(step: Step, settings: AdmlSettings) -> tuple[Tensor, Triplets]:
    with step.frozen() as embed:
        clean = embed(step.batch.images).detach()
    cuts = {"lower": settings.lower or None, "upper": settings.upper or None}
    return clean, step.mine("distance", clean, settings.margin, anchors="all", **cuts)  # type: ignore[arg-type]


def close(a: Result, b: Result) -> bool:
    return torch.allclose(a[0], b[0], atol=1e-12) and all(
        torch.allclose(x, y, atol=1e-12) for x, y in zip(a[1], b[1], strict=True)
    )


# The objective ----------------------------------------------------------------------------------------------


def test_the_worst_case_flees_its_class_and_approaches_others() -> None:
    embed = tanh_embedder(9)
    images = KEY("images").uniform(torch.arange(6), (1, 3, 3))
    clean, labels = embed(images), torch.tensor([0, 0, 1, 1, 2, 2])
    i, j, k = torch.tensor([1, 2, 0, 0]), torch.tensor([0, 0, 1, 2]), torch.tensor([0, 0, 2, 1])
    goal = worst_case(clean, labels, i, j, k)
    at = torch.tensor([3, 0, 2, 1])  # units may come in any order
    e = embed(images[i[at]] + 0.01)[:, None]

    def d(x: int, row: int) -> Tensor:
        return torch.linalg.vector_norm(e[row, 0] - clean[x] + 1e-6)

    # Unit 3 has another class where its own is wanted, and the reverse: nothing holds it or draws it.
    expected = [torch.tensor(0.0), d(0, 1), d(1, 2) - d(2, 2), -d(0, 3)]
    assert goal.value(e, at).tolist() == pytest.approx([float(x) for x in expected], abs=1e-12)


def test_its_gradient_is_that_of_finite_differences_and_the_ascent_climbs_it() -> None:
    embed, rows = tanh_embedder(9), torch.arange(4)
    images, labels = KEY("images").uniform(torch.arange(6), (1, 3, 3)), torch.tensor([0, 0, 1, 1, 2, 2])
    i, j, k = torch.tensor([1, 2, 0, 5]), torch.tensor([0, 0, 1, 4]), torch.tensor([0, 0, 2, 4])
    goal, x = worst_case(embed(images), labels, i, j, k), images[i]
    assert torch.autograd.gradcheck(lambda x: goal.value(embed(x)[:, None], rows), x.requires_grad_())
    x = x.detach()
    found = ascend(Problem(embed, goal, Ball(0.05), Budget(5, 0.02)), x[:, None]).images[:, 0]
    before, after = (goal.value(embed(y)[:, None], rows) for y in (x, found))
    assert (after > before).all() and found.sub(x).abs().max() <= 0.05 + 1e-12


def test_in_a_linear_space_a_small_step_gains_what_it_must() -> None:
    """d(x + δ, y) grows by ε‖Wᵀu‖₁ along the unit vector u from y to x, to first order."""
    embed, weight = linear_embedder(9)
    images = KEY("images").uniform(torch.arange(2), (1, 3, 3)) * 0.5 + 0.2
    clean, eps = embed(images), 1e-6
    goal = worst_case(clean, torch.zeros(2), torch.tensor([1]), torch.tensor([0]), torch.tensor([0]))
    found = ascend(Problem(embed, goal, Ball(eps), Budget(3, eps)), images[1:, None]).images[:, 0]
    u = (clean[1] - clean[0]) / (clean[1] - clean[0]).norm()
    gained = euclidean(embed(found), clean[:1]) - euclidean(clean[1:], clean[:1])
    assert float(gained) == pytest.approx(eps * float((weight.T @ u).abs().sum()), rel=1e-3)


# Who is attacked, and what is trained on --------------------------------------------------------------------


def slow(step: Step, settings: AdmlSettings) -> Tensor:
    """The same loss, tuple by tuple and step by step; formulation 2, zero start, every tuple attacked."""
    images = step.batch.images
    clean, chosen = mined(step, settings)
    alpha = settings.alpha or 2 * settings.eps / settings.steps
    with step.frozen() as embed:

        def moved(i: int, away: int | None, towards: int | None) -> Tensor:
            x = images[i : i + 1].clone()
            for _ in range(settings.steps):
                x.requires_grad_(True)
                e = embed(x)
                goal = torch.zeros(())
                if away is not None:
                    goal = goal + euclidean(e, clean[away : away + 1]).sum()
                if towards is not None:
                    goal = goal - euclidean(e, clean[towards : towards + 1]).sum()
                (gradient,) = torch.autograd.grad(goal, x)
                x = x.detach() + alpha * gradient.sign()
                x = torch.minimum(torch.maximum(x, images[i] - settings.eps), images[i] + settings.eps).clamp(0, 1)
            return step.model(x.detach())[0]

        near, far, live = [], [], step.model(images)
        for a, p, n in zip(chosen.anchor.tolist(), chosen.positive.tolist(), chosen.negative.tolist()):
            one, two = (live[a], live[p]), (live[a], live[n])
            if settings.perturb == "positive":
                one = (live[a], moved(p, a, None))
            elif settings.perturb == "negative":
                two = (live[a], moved(n, None, a))
            elif settings.loss == "triplet":
                one, two = (moved(a, p, n), live[p]), (moved(a, p, n), live[n])
            else:
                one, two = (moved(a, p, None), live[p]), (moved(a, None, n), live[n])
            near.append(torch.linalg.vector_norm(one[0] - one[1] + 1e-6))
            far.append(torch.linalg.vector_norm(two[0] - two[1] + 1e-6))
    pull, push = torch.stack(near), torch.stack(far)
    if settings.loss == "triplet":
        return torch.relu(pull - push + settings.margin).mean()
    short = torch.relu(settings.margin - push)
    if settings.reduction == "all":  # a pair is a tuple: twice as many as images in the batch
        return (pull.sum() + short.sum()) / (2 * len(images))
    return pull.mean() + short[short > 0].mean()


@pytest.mark.parametrize("perturb", ["positive", "negative", "anchor"])
@pytest.mark.parametrize(
    "loss",
    [
        {"loss": "triplet"},
        {"loss": "contrastive", "margin": 1.2},
        {"loss": "contrastive", "margin": 1.2, "reduction": "active"},
    ],
)
def test_a_step_is_what_the_plain_loop_makes_of_it(loss: dict[str, Any], perturb: Any) -> None:
    settings = AdmlSettings(**ROUGH, **loss, perturb=perturb, attack_rate=1.0)
    step = make_step(labels=[0, 0, 1, 1, 2, 2])
    (found, gradients), _ = run(settings, step)
    wanted, expected = train(step, iter([slow(step, settings)]))
    assert torch.allclose(found, wanted, atol=1e-12)
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(gradients, expected, strict=True))
    (harmless, _), _ = run(replace(settings, attack_rate=0.0), step)
    assert found > harmless


@pytest.mark.parametrize("loss", ["triplet", "contrastive"])
def test_all_images_at_once_is_what_the_plain_loop_makes_of_it(loss: Any) -> None:
    settings = AdmlSettings(**ROUGH, loss=loss, margin=0.9, formulation=1, attack_rate=1.0)
    step = make_step()
    images = step.batch.images
    _, chosen = mined(step, settings)
    a, p, n = chosen.anchor, chosen.positive, chosen.negative
    with step.frozen() as embed:
        x = images.clone()
        for _ in range(4):
            e = embed(x.requires_grad_(True))
            (gradient,) = torch.autograd.grad((euclidean(e[a], e[p]) - euclidean(e[a], e[n])).sum(), x)
            x = x.detach() + 0.1 * gradient.sign()
            x = torch.minimum(torch.maximum(x, images - 0.2), images + 0.2).clamp(0, 1)
        e = embed(x)
    expected = {"triplet": losses.triplet, "contrastive": lambda *of: losses.contrastive(*of, reduction="all")}
    (found, _), trained_on = run(settings, step)
    assert torch.allclose(found, expected[loss](e[a], e[p], e[n], 0.9), atol=1e-12)
    assert torch.allclose(trained_on[len(images) :], x, atol=1e-12)


def test_coupled_means_one_number() -> None:
    e = tanh_embedder(9)(KEY("images").uniform(torch.arange(4), (1, 3, 3)))[:, None]
    pulled, pushed = torch.tensor([[0, 1], [1, 0]]), torch.tensor([[0, 2]])
    goal = all_at_once(pulled, pushed)
    expected = euclidean(e[0, 0], e[1, 0]) + euclidean(e[1, 0], e[0, 0]) - euclidean(e[0, 0], e[2, 0])
    assert goal.coupled and torch.allclose(goal.value(e, torch.arange(4)), expected)


@pytest.mark.parametrize("perturb", ["positive", "anchor"])
@pytest.mark.parametrize("start", ["zero", "random"])
def test_formulation_three_adds_how_far_images_flee_themselves(start: Any, perturb: Any) -> None:
    step = make_step()
    settings = AdmlSettings(eps=0.1, start=start, formulation=3, perturb=perturb, attack_rate=0.7, weight=0.0)
    (without, _), images = run(settings, step)
    (found, _), same = run(replace(settings, weight=2.5), step)
    assert torch.equal(images, same)
    moved = images[len(step.batch.images) :]
    with step.frozen() as embed:
        clean, chosen = mined(step, settings)
        hit = step.key("attacked").uniform(2 * chosen.anchor) < 0.7
        origin = (chosen.positive if perturb == "positive" else chosen.anchor)[hit]
        shift = euclidean(embed(moved), clean[origin])
    assert len(moved) == int(hit.sum()) and shift.min() > 1e-3  # not even the zero start leaves an image where it was
    assert torch.allclose(found - without, 2.5 * shift.sum() / len(chosen), atol=1e-12)


def test_formulation_two_hurts_the_loss_more_than_three() -> None:
    step = make_step()
    harm = {}
    for number in (2, 3):
        settings = AdmlSettings(eps=0.1, steps=10, formulation=number, attack_rate=1.0, weight=0.0)
        harm[number], _ = run(settings, step)[0]
    assert harm[2] > harm[3]


# The attack rate --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{}, {"loss": "contrastive", "margin": 1.0}])
def test_without_attacks_it_is_natural_training_on_the_same_tuples(change: dict[str, Any]) -> None:
    step = make_step()
    settings = AdmlSettings(attack_rate=0.0, **change)
    _, chosen = mined(step, settings)
    e = step.embed(step.batch.images)
    a, p, n = e[chosen.anchor], e[chosen.positive], e[chosen.negative]
    plain = losses.contrastive(a, p, n, 1.0, reduction="all") if change else losses.triplet(a, p, n)
    natural = train(step, iter([plain]))
    assert len(chosen) == len(step.batch.images)
    for formulation in (1, 2, 3):
        found, images = run(replace(settings, formulation=formulation), step)
        assert close(found, natural) and torch.equal(images, step.batch.images)


@pytest.mark.parametrize("change", EVERY)
@pytest.mark.parametrize("loss", ["triplet", "contrastive"])
def test_a_benign_batch_is_clean_training_even_with_a_random_start(change: dict[str, Any], loss: Any) -> None:
    step = make_step()
    benign, _ = run(AdmlSettings(eps=0.0, steps=0, loss=loss, attack_rate=1.0, **change), step)
    assert close(benign, run(AdmlSettings(attack_rate=0.0, loss=loss), step)[0])


@pytest.mark.parametrize(
    ("change", "tuples"), [({}, 1), ({"perturb": "anchor"}, 1), ({"perturb": "anchor", "loss": "contrastive"}, 2)]
)
def test_with_rate_one_every_tuple_is_attacked_and_has_its_own_start(change: dict[str, Any], tuples: int) -> None:
    step = make_step()
    images = step.batch.images
    _, seen = run(AdmlSettings(eps=0.05, attack_rate=1.0, **change), step)
    moved = seen[len(images) :]
    assert torch.equal(seen[: len(images)], images) and len(moved) == tuples * len(images)
    _, still = run(AdmlSettings(eps=0.05, steps=0, attack_rate=1.0, **change), step)
    assert len(torch.unique((still[len(images) :] - images.repeat(tuples, 1, 1, 1)).flatten(1), dim=0)) == len(moved)


def test_gamma_is_drawn_for_each_tuple_by_its_key() -> None:
    labels = [c for c in range(40) for _ in "ab"]
    clean = make_step(labels=labels).batch.images
    moved: dict[float, dict[int, Tensor]] = {}
    for rate in (0.3, 0.6, 1.0):
        logged: dict[str, float] = {}
        step = make_step(labels=labels, log=lambda name, value, _=1.0, kept=logged: kept.update({name: float(value)}))
        settings = AdmlSettings(eps=0.05, steps=2, attack_rate=rate)
        _, seen = run(settings, step)
        _, chosen = mined(step, settings)
        hit = (step.key("attacked").uniform(2 * chosen.anchor) < rate).nonzero().squeeze(1).tolist()
        moved[rate] = dict(zip(hit, seen[len(clean) :], strict=True))
        assert logged["attacked"] == pytest.approx(len(hit) / len(clean))
        assert logged["image_steps"] == 2 * len(hit) and logged["shift_all"] == logged["shift_perturbed"] > 0
        assert abs(len(hit) / len(clean) - rate) < 0.15
        for anchor, image in moved[rate].items():
            assert 0 < (image - clean[anchor ^ 1]).abs().max() <= 0.05 + 1e-12  # its positive, within the ball
    # What happens to a tuple does not depend on which others are attacked.
    assert moved[0.3].keys() < moved[0.6].keys() < moved[1.0].keys()
    assert all(torch.allclose(image, moved[1.0][anchor]) for anchor, image in moved[0.3].items())
    other = make_step(labels=labels)
    other.key = KEY("another step")
    _, seen = run(AdmlSettings(eps=0.05, steps=2, attack_rate=0.3), other)
    assert len(seen) != len(clean) + len(moved[0.3]) or not torch.equal(
        seen[len(clean) :], torch.stack([*moved[0.3].values()])
    )


def test_the_two_pairs_of_an_anchor_are_attacked_apart() -> None:
    labels = [c for c in range(40) for _ in "ab"]
    step = make_step(labels=labels)
    _, seen = run(AdmlSettings(loss="contrastive", perturb="anchor", attack_rate=0.5, steps=0), step)
    ids = 2 * torch.arange(80)
    pull, push = (step.key("attacked").uniform(number) < 0.5 for number in (ids, ids + 1))
    assert not torch.equal(pull, push) and len(seen) == 80 + int(pull.sum() + push.sum())


def test_only_matching_pairs_are_attacked_unless_asked() -> None:
    """Equation 15: P(γ = 1 | y_1 ≠ y_2) = 0. A perturbed image stands in for a positive, never for a negative."""
    step = make_step()
    settings = AdmlSettings(loss="contrastive", margin=2.0, attack_rate=1.0, eps=0.2)
    clean, chosen = mined(step, settings)
    pushed = 2 - euclidean(clean[chosen.anchor], clean[chosen.negative])
    logged = [run(replace(settings, perturb=name), step)[0][0] for name in ("positive", "negative", "anchor")]
    pulled = euclidean(clean[chosen.anchor], clean[chosen.positive])
    with step.frozen() as embed:
        moved = embed(run(settings, step)[1][len(clean) :])
    far = euclidean(clean[chosen.anchor], moved)
    assert torch.allclose(logged[0], (far.sum() + pushed.sum()) / 24, atol=1e-12)
    assert (far > pulled).all() and len({float(value) for value in logged}) == 3


# Settings, recipes, training --------------------------------------------------------------------------------


def test_the_step_is_as_long_as_published_unless_set() -> None:
    assert AdmlSettings().budget == Budget(5, 2 * 0.01 / 5, start="random")
    assert AdmlSettings(alpha=0.3).budget.alpha == 0.3
    assert AdmlSettings(eps=0.0, steps=0).budget.steps == 0


def test_cut_offs_reach_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    mine = Step.mine

    def spy(step: Step, *rest: Any, **more: Any) -> Any:
        asked.append((more["lower"], more["upper"], more["anchors"]))
        return mine(step, *rest, **more)

    monkeypatch.setattr(Step, "mine", spy)
    run(AdmlSettings(attack_rate=0.0))
    run(AdmlSettings(attack_rate=0.0, lower=0.0, upper=0.0))
    assert asked == [(0.5, 1.4, "all"), (None, None, "all")]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"attack_rate": 1.1}, "probability"),
        ({"attack_rate": -0.1}, "probability"),
        ({"formulation": 4}, "there are: 1, 2, 3"),
        ({"formulation": 1, "perturb": "anchor"}, "every image"),
        ({"weight": -1.0}, "λ"),
        ({"margin": -0.1}, "margin"),
        ({"sampler": "distanse"}, "did you mean distance"),
        ({"loss": "triplett"}, "did you mean triplet"),
        ({"perturb": "anchors"}, "did you mean anchor"),
        ({"reduction": "active"}, "contrastive"),
        ({"loss": "contrastive", "reduction": "none"}, "no reduction"),
        ({"lower": 1.5}, "larger"),
        ({"lower": -0.5}, "lower"),
        ({"eps": -0.1}, "negative"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        AdmlSettings(**wrong)


def test_the_recipe_is_prints() -> None:
    for name, loss, margin in (("adml", "triplet", 0.2), ("adml-contrastive", "contrastive", 1.0)):
        s = settings_from(name, {"data": {"name": "cub"}})
        assert s.defence == AdmlSettings(loss=loss, margin=margin)  # type: ignore[arg-type]
        assert (s.batch.kind, s.batch.classes, s.batch.instances, s.batch.mining_pairs) == ("classes", 56, 2, 0)
        assert (s.optimiser.lr, s.optimiser.weight_decay, s.data.crop_least) == (1e-6, 4e-4, 0.6)
        assert (s.model.backbone, s.model.dim, s.model.weights, s.train.epochs) == ("resnet50", 128, "imagenet", 150)
        labels = torch.arange(5864) % 100  # as many images and classes as CUB trains on
        assert s.train.epochs * len(class_batches(labels, 56, 2, KEY)) == 7800


@pytest.mark.parametrize("recipe", ["adml", "adml-contrastive"])
def test_the_recipe_is_that_of_the_best_rows(recipe: str) -> None:
    """Table 2: the settings of each row are the recipe's own, without overrides."""
    for data in ("cub", "cars", "sop"):
        row = row_named(f"adml/t2/{data}/{'adml-contrastive' if recipe.endswith('ive') else 'adml-triplet'}")
        name = {"data": {"name": data}}
        assert row.recipe == recipe and settings_from(recipe, name) == settings_from(recipe, name | row_settings(row))


def test_small_data_keep_their_networks() -> None:
    for data, backbone, dim in (("digits", "small", 64), ("gaussians", "mlp", 2)):
        m = settings_from("adml", {"data.name": data}).model
        assert (m.backbone, m.dim, m.weights) == (backbone, dim, "")


TINY: dict[str, Any] = {
    "train": {"epochs": 2, "evaluate_every": 2, "checkpoint_seconds": 0, "collapse_warmup": 9},
    "batch": {"pairs": 100},
    "model": {"dim": 16},
    "data": {"crop": 6, "crop_least": 0.6},
    "defence": {"steps": 2},
}


def test_a_short_training_on_digits(tmp_path: Path) -> None:
    rows = ah.fit(None, ah.dataset("digits"), "adml", tmp_path, overrides=TINY, device="cpu").metrics()
    assert rows[-1]["step"] == 20 and rows[-1]["loss"] < rows[0]["loss"]
    assert 0.4 < rows[-1]["attacked"] < 0.6
