"""Class proxies: losses against plain loops, schedules, what attacks raise, and that weights are left alone."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pytorch_metric_learning import losses as pml
from torch import Tensor

import anchorhold as ah
from anchorhold import losses
from anchorhold.config.recipes import settings_from
from anchorhold.data.mixing import pasted
from anchorhold.defences.natural import natural
from anchorhold.defences.proxy import Proxies, class_proxies
from anchorhold.defences.settings import NaturalSettings, ProxySettings
from anchorhold.defences.step import Step
from anchorhold.defences.training_loss import TrainingLoss, training_loss
from anchorhold.defences.weight_perturbation import with_perturbed_weights
from anchorhold.errors import ModelError, SettingsError
from anchorhold.geometry import unit
from anchorhold.random import Key
from anchorhold.runs.folder import Run
from anchorhold.triplets import SAMPLERS
from tests.defences.test_hardness import make_step, train

LABELS = [7, 7, 3, 3, 9, 9, 7, 7, 5, 5, 3, 3]  # neither from 0 nor without gaps
NUMBERS = torch.tensor([2, 2, 0, 0, 3, 3, 2, 2, 1, 1, 0, 0])  # the same, from 0
ATTACK: dict[str, Any] = {"eps": 0.1, "alpha": 0.03, "steps": 4, "start": "zero", "warm": 0.0}


def with_proxies(**changes: Any) -> tuple[Step, Proxies]:
    step = make_step(LABELS, **changes)
    proxies = Proxies(torch.zeros(2, 16, dtype=torch.float64), step.batch.labels, Key.of(3))
    proxies.proxies.data *= torch.tensor([[0.5], [1.0], [2.0], [3.0]])  # cosines do not depend on lengths
    step.companion = proxies
    return step, proxies


def cosines(step: Step, proxies: Proxies, images: Tensor) -> list[list[float]]:
    """By plain loops."""
    rows, columns = step.model(images).tolist(), proxies.proxies.tolist()

    def cosine(a: list[float], b: list[float]) -> float:
        return sum(x * y for x, y in zip(a, b)) / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))

    return [[cosine(row, column) for column in columns] for row in rows]


def softmax(row: list[float], scale: float) -> list[float]:
    powers = [math.exp(scale * each) for each in row]
    return [each / sum(powers) for each in powers]


# The losses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_normalised_softmax_matches_loops(smoothing: float) -> None:
    step, proxies = with_proxies()
    (found,) = class_proxies(step, ProxySettings(form="natural", scale=5.0, smoothing=smoothing))
    wanted = 0.0
    for row, own in zip(cosines(step, proxies, step.batch.images), NUMBERS.tolist()):
        p = softmax(row, 5.0)
        wanted -= (1 - smoothing) * math.log(p[own]) + smoothing / 4 * sum(map(math.log, p))
    assert found.item() == pytest.approx(wanted / 12, abs=1e-10)


@pytest.mark.parametrize(("scale", "margin"), [(32.0, 0.1), (7.0, 0.3)])
def test_proxy_anchor_is_that_of_pytorch_metric_learning(scale: float, margin: float) -> None:
    step, proxies = with_proxies()
    settings = ProxySettings(form="natural", loss="proxy-anchor", scale=scale, margin=margin)
    found, gradients = train(step, class_proxies(step, settings))
    other = pml.ProxyAnchorLoss(4, 16, margin=margin, alpha=scale).double()
    other.proxies.data.copy_(proxies.proxies.data)
    own = proxies.proxies.grad
    wanted = other(step.model(step.batch.images), NUMBERS)
    step.model.zero_grad()
    wanted.backward()
    assert torch.allclose(found, wanted.detach(), atol=1e-10) and found > 0
    assert own is not None and torch.allclose(own, other.proxies.grad, atol=1e-9) and own.abs().sum() > 0
    for mine, theirs in zip(gradients, (p.grad for p in step.model.parameters() if p.grad is not None)):
        assert torch.allclose(mine, theirs, atol=1e-9)


def test_proxy_anchor_of_a_class_that_the_batch_lacks() -> None:
    """It has no positive part, is in the mean of the negative one, and gives finite gradients."""
    given = torch.tensor([[0.2, -0.3, 0.1], [0.5, 0.4, 0.0]], dtype=torch.float64, requires_grad=True)
    found = losses.proxy_anchor(given, torch.tensor([0, 0]), scale=2.0, margin=0.1)
    found.backward()
    a, b, c, d = (math.exp(2 * (x + 0.1)) for x in (-0.3, 0.4, 0.1, 0.0))
    pull = math.log(1 + math.exp(-2 * (0.2 - 0.1)) + math.exp(-2 * (0.5 - 0.1)))
    assert found.item() == pytest.approx(pull + (math.log(1) + math.log(1 + a + b) + math.log(1 + c + d)) / 3)
    assert given.grad is not None and bool(given.grad.isfinite().all())


def test_divergence_by_hand() -> None:
    p, q = [0.7, 0.2, 0.1], [0.5, 0.25, 0.25]
    wanted = sum(x * math.log(x / y) for x, y in zip(p, q))
    logits = [torch.tensor([each], dtype=torch.float64).log() + 3.0 for each in (p, q)]
    assert losses.divergence(*logits).item() == pytest.approx(wanted, abs=1e-12)
    apart = losses.divergence(torch.randn(5, 3), torch.randn(5, 3))
    assert apart.shape == (5,) and bool((apart > 0).all())


# The attacks -------------------------------------------------------------------------------------------------


def climbed(step: Step, value: Any, start: Tensor) -> Tensor:
    """Four signed steps of 0.03 in a ball of 0.1, by plain loops."""
    clean, moved = step.batch.images, start
    with step.frozen() as embed:
        for _ in range(4):
            moved = moved.detach().requires_grad_(True)
            (gradient,) = torch.autograd.grad(value(embed(moved)), moved)
            moved = moved.detach() + 0.03 * gradient.sign()
            moved = torch.minimum(torch.maximum(moved, clean - 0.1), clean + 0.1).clamp(0, 1)
    return moved


@pytest.mark.parametrize("loss", ["softmax", "proxy-anchor"])
@pytest.mark.parametrize("clean", [0.0, 0.4, 1.0])
def test_min_max_climbs_its_loss_and_mixes_it_with_the_clean_one(loss: Any, clean: float) -> None:
    step, proxies = with_proxies()

    def of(e: Tensor) -> Tensor:
        logits = F.normalize(e, dim=1) @ F.normalize(proxies.proxies, dim=1).T
        if loss == "softmax":
            return F.cross_entropy(6.0 * logits, NUMBERS)
        other = pml.ProxyAnchorLoss(4, 16, margin=0.1, alpha=6.0).double()
        other.proxies.data.copy_(proxies.proxies.data)
        return other(e, NUMBERS)

    moved = climbed(step, of, step.batch.images)
    plain, raised = of(step.model(step.batch.images)), of(step.model(moved))
    assert raised > plain + 0.01
    settings = ProxySettings(form="minmax", loss=loss, scale=6.0, clean=clean, **ATTACK)
    (found,) = class_proxies(step, settings)
    assert torch.allclose(found, clean * plain + (1 - clean) * raised, atol=1e-9)


@pytest.mark.parametrize("start", ["zero", "random"])
def test_trades_adds_the_divergence_that_its_attack_raised(start: Any) -> None:
    seen: dict[str, float] = {}
    step, _ = with_proxies(log=lambda name, value, weight=1.0: seen.update({name: float(value)}))
    (plain,) = class_proxies(step, ProxySettings(form="natural", scale=6.0))
    found = {}
    for steps in (0, 4):
        settings = ProxySettings(form="trades", scale=6.0, beta=3.0, **(ATTACK | {"steps": steps, "start": start}))
        (found[steps],) = class_proxies(step, settings)
        assert torch.allclose(found[steps], plain + 3 * seen["divergence"], atol=1e-10)
    assert found[4] > found[0] + 0.01 and seen["image_steps"] == 12 * 4  # also from a start where it is stationary


@pytest.mark.parametrize("clean", [0.2, 0.5, 0.8])
def test_the_clean_share_of_trades_is_a_share_of_the_loss(clean: float) -> None:
    """As for min-max: the loss is proportional to c · clean + (1 − c) · divergence."""
    seen: dict[str, float] = {}
    step, _ = with_proxies(log=lambda name, value, weight=1.0: seen.update({name: float(value)}))
    (plain,) = class_proxies(step, ProxySettings(form="natural", scale=6.0))
    (found,) = class_proxies(step, ProxySettings(form="trades", scale=6.0, clean=clean, **ATTACK))
    assert seen["divergence"] > 0.001
    assert torch.allclose(clean * found, clean * plain + (1 - clean) * seen["divergence"], atol=1e-9)
    (same,) = class_proxies(step, ProxySettings(form="trades", scale=6.0, beta=1 / clean - 1, **ATTACK))
    assert torch.allclose(found, same, atol=1e-9)


def test_trades_with_nothing_but_the_clean_loss_is_natural_training() -> None:
    step, _ = with_proxies()
    (plain,) = class_proxies(step, ProxySettings(form="natural", scale=6.0))
    settings = ProxySettings(form="trades", scale=6.0, clean=1.0, **ATTACK)
    (found,) = class_proxies(step, settings)
    assert torch.equal(found, plain) and not settings.attacks


def test_trades_against_loops() -> None:
    step, proxies = with_proxies()
    seen: list[Tensor] = []
    step.embed = lambda images: seen.append(images) or step.model(images)  # type: ignore[method-assign, func-returns-value]
    settings = ProxySettings(form="trades", scale=6.0, beta=3.0, **(ATTACK | {"start": "random"}))
    (found,) = class_proxies(step, settings)
    (shown,) = seen
    images, moved = shown.chunk(2)
    assert torch.equal(images, step.batch.images)
    assert 0.09 < (moved - images).abs().max() <= 0.1 + 1e-9
    wanted = 0.0
    for a, b, own in zip(cosines(step, proxies, images), cosines(step, proxies, moved), NUMBERS.tolist()):
        p, q = softmax(a, 6.0), softmax(b, 6.0)
        wanted += -math.log(p[own]) + 3 * sum(x * math.log(x / y) for x, y in zip(p, q))
    assert found.item() == pytest.approx(wanted / 12, abs=1e-9)


@pytest.mark.parametrize("form", ["minmax", "trades"])
def test_epsilon_and_beta_grow(form: Any) -> None:
    settings = ProxySettings(form=form, eps=0.2, steps=5, warm=0.5)
    now = {share: settings.at(share) for share in (0.0, 0.125, 0.25, 0.5, 1.0)}
    assert [each.eps for each in now.values()] == pytest.approx([0, 0.05, 0.1, 0.2, 0.2])
    assert [each.budget.alpha for each in now.values()] == pytest.approx([0, 0.025, 0.05, 0.1, 0.1])  # 2.5 ε / steps
    assert replace(settings, warm=0.0).at(0.0).eps == 0.2
    assert replace(settings, alpha=0.04).at(0.25).budget.alpha == pytest.approx(0.02)
    slow = ProxySettings(form="trades", beta=6.0, beta_warm=0.75)
    assert [slow.beta_at(share) for share in (0.0, 0.25, 0.75, 1.0)] == pytest.approx([0, 2, 6, 6])
    # In L2 a user's 8/255 is a mistake; a schedule may pass it.
    assert ProxySettings(form=form, norm="l2", eps=16 / 255, warm=1.0).at(0.5).ball.eps == 8 / 255


def test_a_step_perturbs_as_far_as_the_schedule_is() -> None:
    step, _ = with_proxies()
    far = []
    for share in (0.0, 0.25, 1.0):
        step.progress = share
        seen: list[Tensor] = []
        step.embed = lambda images, seen=seen: seen.append(images) or step.model(images)  # type: ignore[method-assign, misc]
        list(class_proxies(step, ProxySettings(form="minmax", eps=0.1, steps=5)))
        far.append((seen[0] - step.batch.images).abs().max().item())
    assert far == pytest.approx([0, 0.05, 0.1], abs=1e-9)


def test_a_benign_batch_has_the_clean_loss() -> None:
    step, _ = with_proxies()
    (plain,) = class_proxies(step, ProxySettings(form="natural"))
    for form in ("minmax", "trades"):
        (calm,) = class_proxies(step, replace(ProxySettings(form=form), eps=0.0, steps=0))  # type: ignore[arg-type]
        assert torch.allclose(calm, plain, atol=1e-12)


# A loss of yours -----------------------------------------------------------------------------------------------


def with_yours(name: str, **changes: Any) -> tuple[Step, ProxySettings, TrainingLoss]:
    settings = settings_from("proxy", {"defence": {"loss": name, **changes}}).defence
    step = make_step(LABELS)
    loss = training_loss(settings, torch.zeros(2, 16, dtype=torch.float64), step.batch.labels, Key.of(0))
    assert loss is not None
    step.companion = loss
    return step, settings, loss


PML = "pytorch_metric_learning.losses:"


@pytest.mark.parametrize("name", ["ProxyAnchorLoss", "MultiSimilarityLoss", "ArcFaceLoss"])
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_min_max_over_a_loss_of_yours_climbs_it_and_keeps_a_clean_share(name: str, share: float) -> None:
    step, settings, made = with_yours(f"{PML}{name}", form="minmax", clean=share, **ATTACK)

    def of(e: Tensor) -> Tensor:
        return made.loss(e, NUMBERS)  # type: ignore[no-any-return]

    moved = climbed(step, of, step.batch.images)
    clean, raised = (of(step.model(images)) for images in (step.batch.images, moved))
    assert raised > clean
    (found,) = class_proxies(step, settings)
    assert torch.allclose(found, share * clean + (1 - share) * raised, atol=1e-9)


def test_trades_over_a_loss_of_yours_pulls_embeddings_by_a_growing_beta() -> None:
    step, settings, made = with_yours(
        f"{PML}ProxyAnchorLoss", form="trades", beta=4.0, beta_warm=0.5, **(ATTACK | {"warm": 0.5})
    )
    with step.frozen() as embed:
        home = embed(step.batch.images)
    for progress, share in ((0.25, 0.5), (1.0, 1.0)):  # of ε, of its step, and of β
        seen: list[Tensor] = []
        now = replace(step, progress=progress)
        now.embed = lambda images, seen=seen: seen.append(images) or step.model(images)  # type: ignore[method-assign, misc]
        (found,) = class_proxies(now, settings)
        moved = seen[0][12:]
        assert 0.06 * share < (moved - step.batch.images).abs().max() <= 0.1 * share + 1e-9
        apart = (step.model(moved) - home).square().sum(1).mean()
        assert apart > 0
        assert torch.allclose(found, made.loss(step.model(step.batch.images), NUMBERS) + 4 * share * apart, atol=1e-9)


def test_perturbed_weights_and_a_loss_that_remembers() -> None:
    class Centred(torch.nn.Module):
        """With a running mean of embeddings."""

        middle: Tensor

        def __init__(self, embedding_size: int) -> None:
            super().__init__()
            self.register_buffer("middle", torch.zeros(embedding_size))

        def forward(self, e: Tensor, labels: Tensor) -> Tensor:
            self.middle.lerp_(e.detach().mean(0), 0.1)
            return (e - self.middle).square().mean()

    step, settings, made = with_yours(Centred, form="natural", awp=0.05)  # type: ignore[arg-type]
    seen: list[Tensor] = []
    inner = with_perturbed_weights(step, lambda each: next(class_proxies(each, replace(settings, awp=0.0))), 0.05)
    seen.append(inner.embed(step.batch.images).detach().mean(0))
    assert not made.loss.middle.any()  # the trial pass left no trace
    (worst,) = class_proxies(step, settings)
    assert torch.allclose(made.loss.middle, 0.1 * seen[0], atol=1e-9)
    made.loss.middle.zero_()
    (plain,) = class_proxies(step, replace(settings, awp=0.0))
    assert worst > plain


@pytest.mark.medium
def test_a_run_over_a_loss_of_yours_trains_its_proxies_and_holds_a_teacher(digits: ah.Dataset, tmp_path: Path) -> None:
    first = ah.fit(None, digits, "proxy", tmp_path / "first", overrides=QUICK, device="cpu")
    gaps = {}
    for rate in (0.0, 20.0):
        own = {"loss": f"{PML}ProxyAnchorLoss", "teacher": str(first.path), "drift": 0.0, "drift_rate": rate}
        changes = {**QUICK, "defence": own, "optimiser": {"lr": 0.01}}
        run = ah.fit(ah.load(first.path), digits, "proxy-minmax", tmp_path / f"{rate}", overrides=changes, device="cpu")
        gaps[rate] = run.metrics()[-1]["drift"]
        assert [name for name in tensors(run) if name.startswith("companion.")] == [
            "companion.classes",
            "companion.loss.proxies",
        ]
    assert gaps[20.0] < 0.8 * gaps[0.0]
    made = settings_from("proxy-minmax", {"defence": {"loss": f"{PML}ProxyAnchorLoss"}}).defence
    assert made.attacks and made.proxy_lr == 1e-2
    with pytest.raises(SettingsError, match=r"does not read defence\.smoothing"):
        settings_from("proxy", {"defence": {"loss": f"{PML}ProxyAnchorLoss", "smoothing": 0.1}})


# Perturbed weights -------------------------------------------------------------------------------------------


def test_weight_perturbation_against_loops_and_weights_stay() -> None:
    step, proxies = with_proxies()
    before = {name: p.clone() for name, p in step.model.state_dict().items()}
    settings = ProxySettings(form="natural", awp=0.05)
    _, gradients = train(step, class_proxies(step, settings))
    names = [name for name, p in step.model.named_parameters() if p.grad is not None]
    assert all(torch.equal(p, before[name]) for name, p in step.model.state_dict().items())

    def plain(model: ah.Embedder) -> Tensor:
        return F.cross_entropy(16 * model(step.batch.images) @ F.normalize(proxies.proxies, dim=1).T, NUMBERS)

    other = make_step(LABELS).model
    assert isinstance(other, ah.Embedder)
    first = plain(other)
    first.backward()
    with torch.no_grad():
        for p in other.parameters():
            if p.ndim > 1 and p.grad is not None:
                p += 0.05 * p.norm() * p.grad / p.grad.norm()
    other.zero_grad()
    worst = plain(other)
    worst.backward()
    assert worst > first + 0.01
    for name, gradient in zip(names, gradients):
        wanted = dict(other.named_parameters())[name].grad
        assert wanted is not None and torch.allclose(gradient, wanted, atol=1e-10)
    assert not torch.allclose(gradients[0], train(step, class_proxies(step, ProxySettings(form="natural")))[1][0])


def test_weight_perturbation_begins_with_its_epoch() -> None:
    step, _ = with_proxies()
    late = ProxySettings(form="natural", awp=0.05, awp_from=2)
    plain = next(class_proxies(step, ProxySettings(form="natural")))
    values = []
    for step.epoch in (1, 2):
        values.append(next(class_proxies(step, late)))
    assert torch.equal(values[0], plain) and values[1] > plain + 0.01


@pytest.mark.medium
def test_the_trial_pass_leaves_the_statistics_of_batchnorm() -> None:
    model = ah.Embedder("test_resnet", 8, channels=1, size=8, freeze_batchnorm=False).double().train()
    step = make_step(LABELS)
    step.model = model
    before = {name: b.clone() for name, b in model.named_buffers()}
    moved = with_perturbed_weights(step, lambda step: step.embed(step.batch.images)[:, 0].sum(), 0.01)
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())
    moved.embed(step.batch.images)  # the pass that trains counts
    assert any(not torch.equal(b, before[name]) for name, b in model.named_buffers())


# A run -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> ah.Dataset:
    whole = ah.dataset("digits")
    return replace(
        whole,
        train=whole.train.keep(torch.arange(len(whole.train)) < 150),
        test=whole.test.keep(torch.arange(len(whole.test)) < 60),
    )


QUICK: dict[str, Any] = {"train": {"epochs": 2, "evaluate_every": 2}, "model": {"dim": 8}, "batch": {"images": 30}}


def tensors(run: Run) -> dict[str, Tensor]:
    loaded = run.load()
    assert loaded is not None
    return loaded[0]


@pytest.mark.medium
def test_proxies_train_at_their_own_rate_and_are_saved(digits: ah.Dataset, tmp_path: Path) -> None:
    slow = {**QUICK, "defence": {"proxy_lr": 1e-9}, "optimiser": {"weight_decay": 0}}
    run = ah.fit(None, digits, "proxy-minmax", tmp_path / "slow", overrides=slow, device="cpu")
    key, classes = Key.of(0)("loss", "begin"), len(torch.unique(digits.train.labels))
    first = unit(key.normal(torch.arange(classes), (8,))).float()
    assert torch.allclose(tensors(run)["companion.proxies"], first, atol=1e-6)
    fast = {**QUICK, "defence": {"proxy_lr": 0.01}}
    run = ah.fit(None, digits, "proxy-minmax", tmp_path / "fast", overrides=fast, device="cpu")
    apart = (tensors(run)["companion.proxies"] - first).abs().max()
    assert 0.02 < apart <= 10 * 0.011  # ten steps of at most the rate
    info, rows = run.read_json(), run.metrics()
    assert rows[-1]["step"] == 10 and rows[-1]["accuracy_training"] > 0
    assert info["image_steps"] == (2 * 150 - 30) * 5  # the first batch has ε = 0
    assert {"separability", "shift_all", "active_first"} <= rows[0].keys()
    natural_run = ah.fit(None, digits, "proxy", tmp_path / "natural", overrides=QUICK, device="cpu")
    assert natural_run.read_json()["image_steps"] == 0 and "flags" not in natural_run.read_json()


@pytest.mark.medium
def test_triplets_are_refused_in_batches_of_single_images(digits: ah.Dataset, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="set batch"):
        single = {**QUICK, "batch": {"kind": "images"}}
        ah.fit(None, digits, "natural", tmp_path / "run", overrides=single, device="cpu")
    step = make_step(paired=False)
    with pytest.raises(SettingsError, match="set batch"):
        next(natural(step, NaturalSettings()))


def test_a_loop_of_your_own_would_not_train_the_proxies() -> None:
    model = ah.Embedder("small", 8, channels=1, size=8)
    with pytest.raises(SettingsError, match="proxies of its own"):
        ah.adversary(model, torch.rand(4, 1, 8, 8), [0, 0, 1, 1], "proxy-minmax")


# CutMix --------------------------------------------------------------------------------------------------------


def test_cutmix_mixes_targets_by_the_area_that_is_kept() -> None:
    step, proxies = with_proxies()
    mixed, others, kept = pasted(step.batch.images, 1.0, step.key("cutmix"))
    assert kept.min() < 0.6 and kept.max() > 0.9 and not torch.equal(mixed, step.batch.images)
    (found,) = class_proxies(step, ProxySettings(form="natural", scale=5.0, smoothing=0.1, cutmix=1.0))
    soft = F.one_hot(NUMBERS, 4) * kept.unsqueeze(1) + F.one_hot(NUMBERS[others], 4) * (1 - kept).unsqueeze(1)
    logits = 5 * torch.tensor(cosines(step, proxies, mixed), dtype=torch.float64)
    assert torch.allclose(found, F.cross_entropy(logits, soft, label_smoothing=0.1), atol=1e-10)


def test_min_max_climbs_the_mixed_loss() -> None:
    step, proxies = with_proxies()
    mixed, others, kept = pasted(step.batch.images, 1.0, step.key("cutmix"))
    soft = F.one_hot(NUMBERS, 4) * kept.unsqueeze(1) + F.one_hot(NUMBERS[others], 4) * (1 - kept).unsqueeze(1)

    def of(e: Tensor) -> Tensor:
        return F.cross_entropy(6 * F.normalize(e, dim=1) @ F.normalize(proxies.proxies, dim=1).T, soft)

    step.batch = replace(step.batch, images=mixed)
    moved = climbed(step, of, mixed)
    raised = of(step.model(moved))
    assert raised > of(step.model(mixed)) + 0.01
    again, _ = with_proxies()
    (found,) = class_proxies(again, ProxySettings(form="minmax", scale=6.0, cutmix=1.0, **ATTACK))
    assert torch.allclose(found, raised, atol=1e-9)


# Triplets ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["natural", "minmax", "trades"])
def test_triplets_are_added_over_what_is_embedded(form: Any) -> None:
    step, _ = with_proxies()
    seen: list[Tensor] = []
    step.embed = lambda images: seen.append(step.model(images)) or seen[-1]  # type: ignore[method-assign, func-returns-value]
    attack = {} if form == "natural" else ATTACK
    (plain,) = class_proxies(step, ProxySettings(form=form, **attack))
    (found,) = class_proxies(step, ProxySettings(form=form, triplets=0.7, triplet_margin=0.3, **attack))
    parts = seen[-1].split(12)
    assert len(parts) == (2 if form == "trades" else 1)
    wanted = 0.0
    for e in parts:
        chosen = step.mine("softhard", e.detach(), 0.3, "triplets")
        for a, p, n in zip(chosen.anchor.tolist(), chosen.positive.tolist(), chosen.negative.tolist()):
            wanted += max(0.0, ((e[a] - e[p]).norm() - (e[a] - e[n]).norm()).item() + 0.3) / len(chosen) / len(parts)
    assert wanted > 0.01 and found.item() == pytest.approx(plain.item() + 0.7 * wanted, abs=1e-6)


@pytest.mark.parametrize("form", ["natural", "minmax", "trades"])
def test_triplets_of_hardness_manipulation_are_those_of_the_plain_loop(form: Any) -> None:
    """HM[R, LGA]: from the clean triplets, sign steps on H until H ≥ −min(γ, ℓ), ℓ the loss of the step before."""
    step, _ = with_proxies()
    x = step.batch.images
    x[1:7:2] = 0.7 * x[0:6:2] + 0.3 * x[1:7:2]  # half of the triplets begin below their destination
    attack = ATTACK | {"alpha": 0.02}
    by: dict[str, Any] = {"sampler": "random", "triplet_margin": 0.02, "triplet_attack": "hm"}
    settings = ProxySettings(form=form, triplets=0.7, **by, **attack)
    assert settings.attacks
    (plain,) = class_proxies(step, ProxySettings(form=form, **attack))

    def apart(x: Tensor, y: Tensor) -> Tensor:
        return (x - y + 1e-6).square().sum(1).sqrt()

    previous, stayed = 2.0, []
    for _ in range(2):
        with step.frozen() as embed:
            e = embed(step.batch.images)
            chosen = step.mine("random", e, 0.02, "triplets")
            clean = [step.batch.images[i] for i in (chosen.anchor, chosen.positive, chosen.negative)]
            moved = [x.clone() for x in clean]
            for _ in range(4):
                moved = [x.requires_grad_(True) for x in moved]
                a, p, n = (embed(x) for x in moved)
                height = apart(a, p) - apart(a, n)
                below = (-min(0.02, previous) - height).clamp(min=0)
                gradients = torch.autograd.grad(-below.square().sum(), moved)
                stayed.append(int((below == 0).sum()))
                moved = [
                    (x + (y.detach() + 0.02 * g.sign() - x).clamp(-0.1, 0.1)).clamp(0, 1)
                    for x, y, g in zip(clean, moved, gradients)
                ]
            a, p, n = (embed(x) for x in moved)
            wanted = (apart(a, p) - apart(a, n) + 0.02).clamp(min=0).mean()
        (found,) = class_proxies(step, settings)
        assert found.item() == pytest.approx((plain + 0.7 * wanted).item(), abs=1e-8)
        previous = wanted.item()
        assert step.state["previous_loss"].item() == pytest.approx(previous, abs=1e-8)
    assert min(stayed) < max(stayed)  # triplets end at their destination


def test_triplets_on_proxies_need_pairs() -> None:
    step, _ = with_proxies(paired=False)
    with pytest.raises(SettingsError, match="set batch"):
        list(class_proxies(step, ProxySettings(form="natural", triplets=1.0)))


# A teacher -----------------------------------------------------------------------------------------------------


def taught(**changes: Any) -> tuple[Step, ah.Embedder]:
    step, proxies = with_proxies(**changes)
    teacher = ah.Embedder("small", 16, channels=1, size=8, seed=5).double().eval().requires_grad_(False)
    proxies._teacher = (teacher,)
    return step, teacher


@pytest.mark.parametrize("form", ["natural", "minmax", "trades"])
def test_the_multiplier_rises_by_the_gap_beyond_the_drift_and_falls_to_zero(form: Any) -> None:
    step, teacher = taught()
    attack: dict[str, Any] = {} if form == "natural" else ATTACK
    own, others = step.model(step.batch.images), teacher(step.batch.images)
    gap = 1 - (own * others).sum(1).mean()  # of unit vectors
    (plain,) = class_proxies(with_proxies()[0], ProxySettings(form=form, **attack))
    settings = ProxySettings(form=form, teacher="x", drift=0.05, drift_rate=0.5, **attack)
    multiplier = 1.0
    for _ in range(3):
        (found,) = class_proxies(step, settings)
        assert found.item() == pytest.approx((plain + multiplier * (gap - 0.05)).item(), abs=1e-9)
        multiplier += 0.5 * (gap.item() - 0.05)
        assert step.state["drift_multiplier"].item() == pytest.approx(multiplier, abs=1e-9)
    for _ in range(99):
        list(class_proxies(step, replace(settings, drift=2.0)))
    assert step.state["drift_multiplier"] == 0
    (found,) = class_proxies(step, settings)
    assert found.item() == pytest.approx(plain.item(), abs=1e-9)


def test_a_pass_that_perturbs_weights_does_not_count_for_the_multiplier() -> None:
    seen: dict[str, float] = {}
    step, _ = taught(log=lambda name, value, weight=1.0: seen.update({name: float(value)}))
    list(class_proxies(step, ProxySettings(form="natural", teacher="x", awp=0.05)))
    assert step.state["drift_multiplier"].item() == pytest.approx(1 + 0.1 * (seen["drift"] - 0.1), abs=1e-9)


@pytest.mark.medium
def test_a_teacher_keeps_a_student_near_and_is_recorded(digits: ah.Dataset, tmp_path: Path) -> None:
    first = ah.fit(None, digits, "proxy", tmp_path / "first", overrides=QUICK, device="cpu")
    gaps = {}
    for name, more in (("free", {"drift_rate": 0.0, "drift": 0.0}), ("held", {"drift_rate": 20.0, "drift": 0.0})):
        changes = {**QUICK, "defence": {"teacher": str(first.path), **more}, "optimiser": {"lr": 0.01}}
        run = ah.fit(ah.load(first.path), digits, "robust", tmp_path / name, overrides=changes, device="cpu")
        gaps[name] = run.metrics()[-1]["drift"]
        assert run.read_json()["settings"]["defence"]["teacher_hash"] == first.read_json()["weights"]
        assert not any("teacher" in key for key in tensors(run))
    assert gaps["held"] < 0.7 * gaps["free"]
    other = {**QUICK, "model": {"dim": 4}, "defence": {"teacher": str(first.path)}}
    with pytest.raises(SettingsError, match=r"embeddings of 8, and the model of 4: set model\.dim=8"):
        ah.fit(None, digits, "robust", tmp_path / "narrow", overrides=other, device="cpu")
    changes = {**QUICK, "train": {"seed": 4, "epochs": 1}}
    ah.fit(None, digits, "proxy", first.path, overrides=changes, device="cpu", replace_run=True)
    run.update_json(status="interrupted")
    with pytest.raises(ModelError, match="is not the teacher that this run began with"):
        ah.resume(run.path, data=digits, device="cpu")


@pytest.mark.medium
def test_a_run_is_resumed_from_elsewhere_and_with_a_teacher_that_moved(
    digits: ah.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ah.fit(None, digits, "proxy", tmp_path / "first", overrides=QUICK, device="cpu")
    monkeypatch.chdir(tmp_path)
    changes = {**QUICK, "defence": {"teacher": "first"}}
    run = ah.fit(ah.load(first.path), digits, "proxy", tmp_path / "run", overrides=changes, device="cpu")
    wanted = run.read_json()["weights"]

    def resumed(**more: Any) -> str:
        run.update_json(status="interrupted")
        return str(ah.resume(run.path, data=digits, device="cpu", **more).read_json()["weights"])

    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert resumed() == wanted
    first.path.rename(tmp_path / "moved")
    with pytest.raises(SettingsError, match=r"no teacher at .*first; if it has moved, give its new place: own="):
        resumed()
    assert resumed(own={"teacher": tmp_path / "moved"}) == wanted
    with pytest.raises(ModelError, match="is not the teacher that this run began with"):
        resumed(own={"teacher": run.path})


@pytest.mark.medium
def test_a_run_whose_only_step_had_no_radius_is_flagged(digits: ah.Dataset, tmp_path: Path) -> None:
    changes = {**QUICK, "train": {"epochs": 1}, "batch": {"images": 150}}
    info = ah.fit(None, digits, "robust", tmp_path / "run", overrides=changes, device="cpu").read_json()
    assert info["image_steps"] == 0 and [flag["name"] for flag in info["flags"]] == ["no-attack"]


def test_a_sampler_of_yours_draws_the_triplets_beside_proxies() -> None:
    step, _ = with_proxies()
    found = {}
    choices: dict[str, Any] = {"ours": "random", "yours": SAMPLERS["random"]}
    for name, sampler in choices.items():
        settings = ProxySettings(form="natural", triplets=1.0, sampler=sampler)
        (found[name],) = class_proxies(step, settings)
    assert torch.equal(found["ours"], found["yours"])
    chosen = settings_from(
        "robust", {"defence.triplets": 1, "batch.kind": "pairs", "defence.sampler": "anchorhold.triplets:semihard"}
    )
    assert str(chosen.defence.sampler) == "anchorhold.triplets:semihard"


# Settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"form": "minmex"}, "did you mean minmax"),
        ({"loss": "proxy"}, "proxy-anchor"),
        ({"scale": 0.0}, "defence.scale"),
        ({"clean": 1.5}, "defence.clean"),
        ({"clean": 0.4, "form": "natural"}, "defence.form = minmax or trades"),
        ({"clean": 0.4, "form": "trades", "beta": 6.0}, "set defence.clean=0.143"),
        ({"clean": 0.0, "form": "trades"}, "a small share such as 0.05"),
        ({"clean": 0.0, "form": "natural"}, "defence.form = minmax or trades"),
        ({"clean": "some"}, "defence.clean"),
        ({"beta": 6.0}, "defence.form = trades"),
        ({"margin": 0.2}, "defence.loss = proxy-anchor"),
        ({"smoothing": 0.1, "loss": "proxy-anchor"}, "defence.loss = softmax"),
        ({"smoothing": 1.0}, "defence.smoothing"),
        ({"warm": -0.1}, "defence.warm"),
        ({"awp": -1.0}, "defence.awp"),
        ({"awp_from": 3}, "defence.awp: set that too"),
        ({"proxy_lr": 0.0}, "defence.proxy_lr"),
        ({"cutmix": 0.5, "loss": "proxy-anchor"}, "defence.loss = softmax"),
        ({"cutmix": 1.5}, "defence.cutmix"),
        ({"sampler": "random"}, "defence.triplets: set that too"),
        ({"triplets": 1.0, "sampler": "rnadom"}, "did you mean random"),
        ({"triplets": -1.0}, "defence.triplets"),
        ({"triplet_attack": "hm"}, "defence.triplets: set that too"),
        ({"triplets": 1.0, "triplet_attack": "hmm"}, "did you mean hm"),
        ({"triplets": 1.0, "triplet_attack": "hm", "triplet_margin": 0.0}, "LGA scales with it"),
        ({"drift": 0.2}, "defence.teacher: set that too"),
        ({"cutmix": 0.5, "triplets": 1.0}, "leave one of them out"),
    ],
)
def test_settings_without_effect_or_sense_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        ProxySettings(**changes)


def test_the_recipes_are_those_of_the_trial() -> None:
    for name, form in (("proxy", "natural"), ("proxy-minmax", "minmax"), ("proxy-trades", "trades")):
        s = settings_from(name)
        assert (s.defence_name, s.defence.form, s.defence.scale, s.defence.steps) == ("proxy", form, 16, 5)
        assert (s.optimiser.name, s.optimiser.lr, s.optimiser.schedule) == ("adamw", 1e-4, "one-cycle")
        assert (s.batch.kind, s.batch.images, s.defence.proxy_lr, s.defence.warm) == ("images", 112, 1e-2, 0.5)
