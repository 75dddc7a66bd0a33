"""Flags: each is raised by a model made for it, sound models raise none, and each is in docs/audit/flags.md."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import anchorhold as ah
from anchorhold.attacks.goal import Scene
from anchorhold.attacks.run import BALL, PGD, Attack, Attacked
from anchorhold.auditing import flags as checks
from anchorhold.auditing import probe
from anchorhold.auditing.flags import FLAGS, SAMPLES, UNBOUNDED_STEPS, Flag, Probe, examine, image_steps_at_most
from anchorhold.data.splits import Dataset
from anchorhold.errors import DataError
from anchorhold.geometry import unit
from anchorhold.model.frozen import Embed, embed_all, frozen
from anchorhold.perturb.ball import Ball
from anchorhold.perturb.settings import Budget
from anchorhold.random import Key
from anchorhold.scores import Interval
from tests.attacking import running

pytestmark = pytest.mark.medium

DOCS = Path(__file__).resolve().parents[2] / "docs" / "audit" / "flags.md"
WEIGHT = Key.of(0)("weight").normal(torch.arange(16), (64,), torch.float32)
SMALL = Ball(0.06), Budget(16, 0.02)  # not multiples of 1/255
BLIND = {"zero-gradient", "steps-do-not-hurt", "eps-does-not-hurt", "unbounded-attack-fails", "noise-as-strong"}


def pixels(data: Dataset) -> tuple[Tensor, Tensor]:
    images = data.test.images
    assert images is not None
    return images.permute(0, 3, 1, 2).float() / (255 if images.dtype == torch.uint8 else 1), data.test.labels


IMAGES, LABELS = pixels(ah.dataset("digits"))  # 896 digits, 5 classes


def train(recipe: str, epochs: int, out: Path, data: str = "digits") -> ah.Embedder:
    changes = {"train": {"epochs": epochs, "evaluate_every": 99}}
    ah.fit(None, ah.dataset(data), recipe, out, overrides=changes, device="cpu")
    return ah.load(out)


@pytest.fixture(scope="module")
def natural(tmp_path_factory: pytest.TempPathFactory) -> ah.Embedder:
    return train("natural", 4, tmp_path_factory.mktemp("runs") / "natural").eval().requires_grad_(False)


@pytest.fixture(scope="module")
def robust(tmp_path_factory: pytest.TempPathFactory) -> ah.Embedder:
    return train("hm-lga", 4, tmp_path_factory.mktemp("runs") / "robust").eval().requires_grad_(False)


def linear(x: Tensor) -> Tensor:
    return unit((x.flatten(1) - 0.3) @ WEIGHT.T)


def look(
    embed: Embed,
    ball: Ball = BALL,
    budget: Budget = PGD,
    images: Tensor = IMAGES,
    labels: Tensor = LABELS,
    scene: Scene | None = None,
    samples: int = 32,
    **more: object,
) -> dict[str, Flag]:
    scene = scene or Scene.of(embed_all(embed, [images]), labels)
    flags = examine(Probe(embed, images, scene, torch.arange(len(images)), ball, budget, Key.of(1), **more), samples)  # type: ignore[arg-type]
    names = [flag.name for flag in flags]
    assert names == [name for name in FLAGS if name in names]  # in the order of the page, none twice
    return {flag.name: flag for flag in flags}


# ---------------------------------------------------------------- sound models


@pytest.mark.parametrize(
    ("ball", "budget"),
    [
        (BALL, PGD),
        SMALL,
        pytest.param(Ball(2 / 255), Budget(16, 1 / 255), marks=pytest.mark.slow),
        pytest.param(Ball(0.1), Budget(1, 0.1), marks=pytest.mark.slow),  # FGSM
        pytest.param(Ball(0.2), Budget(8, 0.05, start="random", restarts=2, keep="best"), marks=pytest.mark.slow),
        pytest.param(
            Ball(0.4), Budget(10, 0.1), marks=pytest.mark.slow
        ),  # every sample is lost already: a larger ε need not gain
        (Ball(1.0, "l2"), Budget(16, 0.2)),
    ],
)
def test_sound_models_raise_nothing(natural: ah.Embedder, robust: ah.Embedder, ball: Ball, budget: Budget) -> None:
    with frozen(natural) as one, frozen(robust) as other:
        for embed in (one, other, linear, lambda x: x.flatten(1) @ WEIGHT.T):
            assert look(embed, ball, budget) == {}


@pytest.mark.parametrize(("steps", "samples"), [(8, 32), (100, 3)])
def test_the_cost_is_known_before(monkeypatch: pytest.MonkeyPatch, steps: int, samples: int) -> None:
    spent: list[Attacked] = []

    def counted(*arguments: Any) -> Attacked:
        spent.append(Attack.run(*arguments))
        return spent[-1]

    monkeypatch.setattr(checks, "Attack", running(counted))
    monkeypatch.setattr(probe, "Attack", running(counted))
    budget = Budget(steps, 0.01)
    look(linear, BALL, budget, samples=samples)
    *shifts, unbounded = spent
    ahead = image_steps_at_most(BALL, budget, samples)
    # Who is lost under the attack that may draw any image leaves it; the others climb to the end.
    assert sum(each.image_steps for each in shifts) == ahead - samples * UNBOUNDED_STEPS
    assert 0 < unbounded.image_steps <= samples * UNBOUNDED_STEPS
    assert image_steps_at_most(BALL, budget, 10**6) == image_steps_at_most(BALL, budget, SAMPLES)
    assert image_steps_at_most(Ball(0.0), budget, 9) == image_steps_at_most(BALL, Budget(0, 0.1), 9) == 0


@pytest.mark.slow
def test_a_circle_raises_nothing(tmp_path: Path) -> None:
    """On it one step is nearly the best attack there is: more steps must not be expected to gain."""
    data = ah.dataset("gaussians")
    images, labels = pixels(data)
    with frozen(train("natural", 25, tmp_path / "circle", "gaussians")) as embed:
        assert look(embed, Ball(2 / 255), Budget(32, 1 / 255), images, labels) == {}
        assert look(embed, images=images, labels=labels) == {}


def test_few_queries_against_a_gallery_raise_nothing(natural: ah.Embedder) -> None:
    with frozen(natural) as embed:
        e = embed_all(embed, [IMAGES])
        scene = Scene(e[96:], LABELS[96:], e[:96], LABELS[:96], torch.full((96,), -1))
        ids = torch.arange(80, 92)
        assert examine(Probe(embed, IMAGES[ids], scene, ids, BALL, PGD, Key.of(2))) == []


# ---------------------------------------------------------------- masked gradients


def quantised(x: Tensor) -> Tensor:
    return (3 * x).round() / 3


def saturated(x: Tensor) -> Tensor:
    return 0.5 + 0.5 * torch.tanh(1e4 * (x - 0.499))


@pytest.mark.parametrize("mask", [quantised, lambda x: quantised(x).detach(), saturated], ids=["round", "cut", "tanh"])
@pytest.mark.parametrize("ball", [BALL, pytest.param(Ball(1.0, "l2"), marks=pytest.mark.slow)], ids=["linf", "l2"])
def test_masked_input_is_caught(natural: ah.Embedder, mask: Callable[[Tensor], Tensor], ball: Ball) -> None:
    found = look(lambda x: natural(mask(x)), ball)
    assert set(found) == BLIND
    assert found["zero-gradient"].value == 1 and "100%" in found["zero-gradient"].message


def test_saturated_embeddings_are_caught() -> None:
    found = look(lambda x: unit(torch.sigmoid(1e4 * (x.flatten(1) - 0.4) @ WEIGHT.T)))
    assert set(found) == BLIND


def test_half_saturated_embeddings_are_caught() -> None:
    """Most gradients are left and the bounded attack moves; the unbounded one shows what is missing."""
    found = look(lambda x: unit(torch.sigmoid(50 * (x.flatten(1) - 0.4) @ WEIGHT.T)), samples=64)
    assert "unbounded-attack-fails" in found and not {"noise-as-strong", "eps-does-not-hurt"} & set(found)


def test_quantisation_with_a_way_back_is_sound(robust: ah.Embedder) -> None:
    assert look(lambda x: robust(x + ((16 * x).round() / 16 - x).detach()), *SMALL) == {}


def test_constant_gradients_are_caught(natural: ah.Embedder) -> None:
    direction = Key.of(2).normal(torch.arange(1), (64,), torch.float32)
    found = look(lambda x: unit(natural(x).detach() + 1e-6 * x.flatten(1).sum(1, keepdim=True) * direction))
    assert {"zero-gradient", "noise-as-strong", "unbounded-attack-fails"} <= set(found)
    assert found["zero-gradient"].value == 1


@pytest.mark.parametrize("budget", [pytest.param(Budget(32, 0.02), marks=pytest.mark.slow), Budget(10, 0.02)])
def test_shattered_gradients_are_caught(natural: ah.Embedder, budget: Budget) -> None:
    """The gradient is there and large, but it is that of a ripple far smaller than a step."""
    found = look(lambda x: natural(x + 0.05 * torch.sin(5e3 * x)), Ball(0.06), budget)
    assert {"steps-do-not-hurt", "noise-as-strong"} <= set(found)
    assert "zero-gradient" not in found and "eps-does-not-hurt" not in found
    assert f"{4 * budget.steps} steps" in found["steps-do-not-hurt"].message


def test_a_model_whose_reaction_ends_early_is_caught(natural: ah.Embedder) -> None:
    """It follows a perturbation as far as a byte: gradients are fine at the image, but a larger ε brings nothing."""
    images = (IMAGES * 255).round() / 255

    def embed(x: Tensor) -> Tensor:
        away = torch.cdist(x.flatten(1), images.flatten(1)).argmin(1)
        return natural(images[away] + (x - images[away]).clamp(-1 / 255, 1 / 255))

    found = look(embed, Ball(2 / 255), Budget(16, 1 / 255))
    assert "eps-does-not-hurt" in found and "zero-gradient" not in found


# ---------------------------------------------------------------- images, embeddings, chance


def test_bytes_and_normalised_images_are_caught(natural: ah.Embedder) -> None:
    with frozen(natural) as embed:
        scene = Scene.of(embed_all(embed, [IMAGES]), LABELS)
        assert set(look(embed, images=255 * IMAGES, scene=scene)) == {"image-range"}
        assert "0 to 255, probably bytes" in look(embed, images=255 * IMAGES, scene=scene)["image-range"].message
        assert "image-range" in look(embed, images=(255 * IMAGES).byte(), scene=scene)
        found = look(embed, images=(IMAGES - 0.3) / 0.37, scene=scene)
        assert set(found) == {"image-range"} and "already normalised" in found["image-range"].message
        assert found["image-range"].value == pytest.approx(0.7 / 0.37 - 1, abs=1e-5)
        assert "image-range" in look(embed, images=IMAGES * 1.001, scene=scene)


def test_random_models_are_caught(natural: ah.Embedder) -> None:
    noise = torch.Generator().manual_seed(0)
    for size in (0.01, 0.2):
        found = look(lambda x, size=size: unit(natural(x) + size * torch.randn(len(x), 64, generator=noise)))
        assert found["not-deterministic"].value > 1e-4


def test_nan_is_caught(natural: ah.Embedder) -> None:
    found = look(lambda x: natural(x) / (x.flatten(1).mean(1, keepdim=True) > 0.25))
    assert set(found) == {"nan-embeddings"}  # nothing is attacked any more
    assert 0 < found["nan-embeddings"].value < 1
    with frozen(natural) as embed:
        scene = Scene.of(embed_all(embed, [IMAGES]), LABELS)
        gallery = scene.gallery.clone()
        gallery[3, 0] = torch.inf
        assert "nan-embeddings" in look(embed, scene=replace(scene, gallery=gallery))


def between_levels(x: Tensor) -> Tensor:
    """Which images (N,) are no 8-bit images, so were changed by an attack."""
    return ((255 * x - (255 * x).round()).abs() > 0.01).flatten(1).any(1)


def broken_under_attack(x: Tensor) -> Tensor:
    return linear(x).masked_fill(between_levels(x)[:, None], torch.nan)


def test_nan_for_changed_images_is_caught() -> None:
    images = (255 * IMAGES).round() / 255
    found = look(broken_under_attack, *SMALL, images=images)
    assert set(found) == {"nan-embeddings"} and found["nan-embeddings"].value == 1
    assert "failed attacks" in found["nan-embeddings"].message
    # Noise may miss what an attack of the audit finds.
    assert look(linear, images=images, rejected=0.25)["nan-embeddings"].value == 0.25
    assert "nan-embeddings" not in look(linear, images=images)


def without_root(x: Tensor) -> Tensor:
    """The same as `linear`, with the gradient of a root at 0 for every fourth image."""
    even = ((x.flatten(1).mean(1) * 1e4).long() % 4 != 0).to(x)
    return linear(x) + ((0 * x[:, 0, 0]).square().sum(1) + even).sqrt()[:, None] - even[:, None]


def test_gradients_that_are_not_finite_are_counted() -> None:
    found = look(without_root)["zero-gradient"]
    assert 0.05 < found.value < 0.6 and f"not finite for {found.value:.0%} of the queries" in found.message


def test_collapse_is_caught_and_says_what_it_scores(natural: ah.Embedder) -> None:
    constant = look(lambda x: unit(torch.ones(len(x), 8) + 0 * x.flatten(1)[:, :8]), measured={"ERS": 31.24})
    assert "scores ERS 29.7, this one 31.2" in constant["collapse"].message
    nearly = look(lambda x: unit(100 + 0.01 * x.flatten(1) @ WEIGHT.T))
    assert nearly["collapse"].value == 0  # still separable, but fp32 does not see it
    assert nearly["collapse"].message.endswith("ERS 29.7")
    shuffled = LABELS[Key.of(0).permutation(len(LABELS))]
    assert "collapse" in look(natural, labels=shuffled)


def as_pixels(points: Tensor) -> Tensor:
    """Points (N, D) as images, of which `of_pixels` is the embedding."""
    return (points / 40 + 0.5).reshape(len(points), 1, 1, -1)


def of_pixels(x: Tensor) -> Tensor:
    return unit(x.flatten(1) - 0.5)


def normal(seed: int, name: str, count: int, dim: int) -> Tensor:
    return Key.of(seed)(name).normal(torch.arange(count), (dim,), torch.float32)


def many_centres(seed: int) -> tuple[Tensor, Tensor]:
    """2 classes of 10 images, each around 5 centres, each centre beside one of the other class."""
    labels, centre = torch.arange(2).repeat_interleave(10), torch.arange(20) % 5
    points = normal(seed, "centres", 5, 8)[centre] + 0.3 * normal(seed, "beside", 10, 8)[centre + 5 * labels]
    return points + 0.2 * normal(seed, "spread", 20, 8), labels


@pytest.mark.slow
def test_a_small_folder_that_retrieves_has_not_collapsed() -> None:
    """Separability of 20 images is noise: mostly below its threshold here, with an R@1 far above chance."""
    lured = 0
    for seed in range(20):
        points, labels = many_centres(seed)
        e = unit(points)
        right = float((labels[(e @ e.T).fill_diagonal_(-9).argmax(1)] == labels).double().mean())
        d, own = torch.cdist(e, e), torch.eye(20, dtype=torch.bool)
        match = (labels[:, None] == labels) & ~own
        separability = float((d[~match & ~own].mean() - d[match].mean()) / d[~own].mean())
        if right >= 0.7:
            assert "collapse" not in look(of_pixels, images=as_pixels(points), labels=labels), seed
            lured += separability < 0.02
    assert lured >= 5  # the value alone accuses these


@pytest.mark.parametrize(
    ("classes", "each"),
    [(10, 10), pytest.param(5, 60, marks=pytest.mark.slow), pytest.param(50, 6, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("scale", [1e-2, 1.0], ids=["one place", "anywhere"])
def test_a_collapse_is_caught_where_images_suffice(classes: int, each: int, scale: float) -> None:
    labels = torch.arange(classes).repeat_interleave(each)
    for seed in range(5):
        noise = normal(seed, "noise", len(labels), 512)
        points = scale * noise + (scale < 1)
        found = look(of_pixels, images=as_pixels(points), labels=labels)
        assert "collapse" in found and "near-chance" not in found and "narrow" not in found
        assert found["collapse"].value < 0.02


@pytest.mark.parametrize("sizes", [(100, 100), (150, 50), (180, 20), (120, 40, 40)])
def test_a_collapse_is_caught_where_one_class_is_large(sizes: tuple[int, ...]) -> None:
    """A hub of the large class answers every query, so the value of R@1 alone says little."""
    labels = torch.cat([torch.full((count,), label) for label, count in enumerate(sizes)])
    found = look(of_pixels, images=as_pixels(torch.ones(len(labels), 16)), labels=labels)
    assert "collapse" in found


@pytest.mark.slow
def test_few_images_of_a_collapse_are_not_enough_to_call_it_one_and_that_is_said() -> None:
    """With 6 images neither verdict has evidence; the flag that is raised instead is about what cannot be told."""
    labels, said = torch.tensor([0, 0, 0, 1, 1, 1]), []
    for seed in range(20):
        found = look(of_pixels, images=as_pixels(normal(seed, "noise", 6, 16)), labels=labels)
        said.append(("collapse" in found, "near-chance" in found))
    assert sum(collapse for collapse, _ in said) <= 4
    assert sum(either for _, either in said) >= 14


def test_hardly_above_chance_is_said() -> None:
    """An untrained network: classes lie a little apart, so it has not collapsed, but most answers are wrong."""
    labels = torch.arange(20).repeat_interleave(20)
    for seed in range(3):
        points = 0.25 * normal(seed, "centres", 20, 64)[labels] + normal(seed, "spread", 400, 64)
        found = look(of_pixels, images=as_pixels(points), labels=labels)
        assert "near-chance" in found and "collapse" not in found
        assert found["near-chance"].value < found["near-chance"].threshold == 0.2
    useful = 0.7 * normal(0, "centres", 20, 64)[labels] + normal(0, "spread", 400, 64)
    assert not {"near-chance", "collapse"} & set(look(of_pixels, images=as_pixels(useful), labels=labels))


@pytest.mark.slow
def test_one_sample_is_no_evidence_of_a_quarter(natural: ah.Embedder) -> None:
    masked = {"steps-do-not-hurt", "eps-does-not-hurt", "noise-as-strong"}
    for samples, expected in ((1, set()), (32, masked)):
        with frozen(natural) as embed:
            found = look(lambda x, embed=embed: embed(quantised(x)), samples=samples)
        assert masked & set(found) == expected


def test_a_small_cap_of_the_sphere_is_caught_and_is_no_collapse() -> None:
    """Classes are told apart there, but nothing can move far: ES:D is small for nothing, and TMA large."""
    found = {offset: look(lambda x, offset=offset: unit(offset + x.flatten(1) @ WEIGHT.T)) for offset in (10, 100)}
    assert "narrow" not in found[10] and "collapse" not in found[100]
    assert 0.01 < found[100]["narrow"].value < found[100]["narrow"].threshold == 0.05
    assert "ERS cannot be compared" in found[100]["narrow"].message
    assert "narrow" not in look(lambda x: unit(100 + 0.01 * x.flatten(1) @ WEIGHT.T))  # which is a collapse


# ---------------------------------------------------------------- numbers and bits


def test_wide_intervals_are_caught() -> None:
    narrow, wide = Interval(20.0, 25.0, 0.95, 1000), Interval(20.0, 32.0, 0.95, 1000)
    assert look(linear, intervals={"ERS": narrow}) == {}
    found = look(linear, intervals={"ERS": narrow, "ARS": wide})
    assert set(found) == {"few-samples"} and found["few-samples"].value == 6
    assert found["few-samples"].message.startswith("ARS is known only to ±6.0 points")
    nothing = Interval(torch.nan, torch.nan, 0.95, 0)
    assert "few-samples" in look(linear, intervals={"ERS": nothing, "ARS": narrow})


def few_samples_of(model: torch.nn.Module, **wish: Any) -> Flag | None:
    found = ah.audit(model, "digits", threat=ah.Threat(steps=1), device="cpu", resamples=200, **wish)
    return next((flag for flag in found.flags if flag.name == "few-samples"), None)  # type: ignore[return-value]


def test_wide_intervals_are_caught_without_scores(natural: ah.Embedder) -> None:
    """Of R@1 against ε, else of any column in percent; with ERS and ARS, of those alone."""
    column = few_samples_of(natural, attacks=["GTM"], limit=5)
    assert column is not None and re.match(r"GTM is known only to ±\d", column.message) and column.value > 5
    curve = few_samples_of(natural, attacks=["margin"], epsilons=[8 / 255], limit=5)
    assert curve is not None and re.match(r"(R@1 at ε 8/255|clean R@1) is known only to ±\d", curve.message)
    scores = few_samples_of(natural, limit=5, epsilons=[])
    assert scores is not None and scores.message.startswith(("ERS", "ARS"))


def test_an_interval_without_width_is_no_certainty() -> None:
    """No query is right any more: all resamples agree, and the exact interval judges."""
    nothing = ah.wrap(torch.nn.Flatten(), before=torch.zeros_like, gradients=False)
    few = few_samples_of(nothing, attacks=["GTT"], method="square", limit=10)
    assert few is not None and few.value == pytest.approx(15.4, abs=0.05)
    assert few_samples_of(nothing, attacks=["GTT"], method="square", limit=40) is None


def test_small_galleries_are_caught() -> None:
    assert set(look(linear, images=IMAGES[:199], labels=LABELS[:199])) == {"small-gallery"}
    assert look(linear, images=IMAGES[:200], labels=LABELS[:200]) == {}


@pytest.mark.slow
def test_perturbations_that_no_file_holds_are_caught(natural: ah.Embedder) -> None:
    half = 0.4 / 255
    assert set(look(natural, Ball(half), Budget(16, half / 4))) == {"not-8-bit"}

    def between(x: Tensor) -> Tensor:  # reacts to what lies between two bytes
        return natural(x + 50 * (x - ((255 * x).round() / 255).detach()))

    assert "not-8-bit" in look(between, *SMALL)
    assert "not-8-bit" not in look(between)  # ε and steps are whole bytes: there is nothing in between


# ---------------------------------------------------------------- the page, and the edges


def test_every_flag_has_its_entry_and_every_entry_its_flag() -> None:
    page = DOCS.read_text(encoding="utf-8")
    entries = re.split(r"^## ", page, flags=re.M)[1:]
    assert [entry.splitlines()[0] for entry in entries] == list(FLAGS)
    for entry in entries:
        parts = re.findall(r"^\*\*(Raised if|Meaning:|What to do:)\*\* \S", entry, re.M)
        assert parts == ["Raised if", "Meaning:", "What to do:"], entry.splitlines()[0]


def test_it_is_repeatable_and_cheap() -> None:
    work = 0

    def counted(x: Tensor) -> Tensor:
        nonlocal work
        work += len(x) * x.requires_grad
        return linear(quantised(x))

    first = look(counted, samples=64)
    assert work <= 64 * 300  # image-steps; an audit takes 32 for each attack and query
    assert look(counted, samples=64, budget=replace(PGD, steps=1000, restarts=9)).keys() == first.keys()
    assert work <= 2 * 64 * 300  # however long the audit
    assert look(counted, samples=64) == first


@pytest.mark.parametrize(("ball", "budget"), [(Ball(0.0), PGD), (BALL, Budget(0, 0.1)), (BALL, Budget(8, 0.0))])
def test_an_attack_that_may_not_move_is_not_blamed(ball: Ball, budget: Budget) -> None:
    assert look(linear, ball, budget) == {}


def test_no_larger_ball_is_missed_where_there_is_none() -> None:
    assert look(linear, Ball(1.0), Budget(2, 0.01)) == {}


def test_one_class_only_is_not_the_attacks_fault() -> None:
    assert set(look(linear, labels=torch.zeros_like(LABELS))) == set()


def test_nothing_is_left_behind() -> None:
    model = ah.Embedder("small", dim=8, channels=1, size=8)
    images = IMAGES[:40].clone()
    before = images.clone()
    with frozen(model) as embed:
        look(embed, images=images, labels=LABELS[:40])
    assert torch.equal(images, before) and not images.requires_grad
    assert all(p.grad is None for p in model.parameters()) and model.training


def test_images_and_ids_have_to_agree() -> None:
    scene = Scene.of(linear(IMAGES), LABELS)
    for images in (IMAGES[:0], IMAGES[:3]):
        with pytest.raises(DataError, match="query number"):
            examine(Probe(linear, images, scene, torch.arange(2 if len(images) else 0), BALL, PGD, Key.of(0)))


def test_a_flag_reads_as_a_line() -> None:
    assert str(Flag("collapse", "all is one", 0.0, 0.02)) == "collapse: all is one"


def test_float64_stays() -> None:
    weight = WEIGHT.double()
    assert look(lambda x: F.normalize((x.flatten(1) - 0.3) @ weight.T, dim=1), images=IMAGES.double()) == {}
