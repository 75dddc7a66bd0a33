"""Features that stay where the original network had them, against closed forms."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import anchorhold as ah
from anchorhold.data.images import Images
from anchorhold.data.store import resident
from anchorhold.defences.step import Batch, Step
from anchorhold.pretraining.distil import Original, distil, drifts, original
from anchorhold.pretraining.settings import DistilSettings
from anchorhold.random import Key

KEY = Key.of(4)


def make_step(model: ah.Embedder | None = None, moved: float = 0.0, **changes: Any) -> Step:
    """A step after the network has moved away from what it was by noise of this size."""
    ids, labels = torch.arange(12), torch.arange(12) // 2 % 3
    model = model or ah.Embedder("small", 16, channels=1, size=3, seed=1).double()
    companion = original(model, labels, DistilSettings())
    for number, p in enumerate(model.parameters()):
        noise = KEY("noise", number).normal(torch.arange(p.numel()), (), p.dtype).reshape(p.shape)
        p.data += moved * noise * p.data.std(correction=0)
    batch = Batch(0.3 + 0.4 * KEY("images").uniform(ids, (1, 3, 3)), labels, ids)
    return Step(model=model, batch=batch, epoch=0, epochs=1, key=KEY("step"), state={}, companion=companion, **changes)


def kept(step: Step) -> Tensor:
    assert isinstance(step.companion, Original)
    return step.batch.images[~step.companion.held]


@pytest.mark.parametrize(("norm", "dual"), [("linf", 1), ("l2", 2)])
@pytest.mark.parametrize("start", ["zero", "random"])
def test_one_linear_feature_in_closed_form(
    norm: Literal["linf", "l2"], dual: int, start: Literal["zero", "random"]
) -> None:
    """f_θ = a·x and f_0 = b·x drift by at most |(a − b)·x| + ε‖a‖, the dual norm; divided by the mean of (b·x)²."""
    model = ah.Embedder("small", 4, channels=1, size=3).double()
    model.backbone, model.width = nn.Sequential(nn.Flatten(), nn.Linear(9, 1, bias=False).double()), 1
    step = make_step(model)
    weight = model.backbone[1].weight
    weight.data += 0.5 + KEY("more").uniform(torch.arange(1), (9,))  # so far that δ cannot turn the sign of the drift
    a, b = (net.backbone[1].weight[0] for net in (model, step.companion.embedder))  # type: ignore[union-attr, index]
    x = kept(step).flatten(1)
    settings = DistilSettings(eps=0.1, alpha=0.05, steps=40, norm=norm, start=start)
    (loss,) = distil(step, settings)
    drift = (x @ (a - b)).abs() + 0.1 * a.norm(dual)
    expected = drift.square().mean() / (x @ b).square().mean()
    assert torch.allclose(loss, expected, rtol=1e-6 if norm == "l2" else 1e-10)


@pytest.mark.parametrize("start", ["zero", "random"])
def test_it_moves_though_the_drift_is_stationary_at_first(start: Literal["zero", "random"]) -> None:
    step = make_step()
    (clean,) = distil(step, DistilSettings(eps=0.0, steps=0, start=start))
    (loss,) = distil(step, DistilSettings(eps=0.1, alpha=0.025, steps=8, start=start))
    assert clean == 0 and loss > 1e-4
    loss.backward()
    assert any(p.grad is not None and p.grad.any() for p in step.model.parameters())


def test_the_perturbation_raises_the_drift() -> None:
    step = make_step(moved=0.3)
    losses = [next(distil(step, DistilSettings(eps=eps, alpha=eps / 4, steps=8))) for eps in (0.0, 0.02, 0.1, 0.2)]
    assert losses == sorted(losses) and losses[-1] > 1.05 * losses[0]


def test_without_an_attack_it_is_the_drift_of_clean_images() -> None:
    step = make_step(moved=0.3)
    assert isinstance(step.companion, Original) and isinstance(step.model, ah.Embedder)
    (loss,) = distil(step, DistilSettings(eps=0.0, steps=0))
    far = near = torch.zeros((), dtype=torch.float64)
    for image in kept(step):  # mean 0, std 1
        now, then = (net.backbone(image[None])[0] for net in (step.model, step.companion.embedder))
        far, near = far + (now - then).square().sum(), near + then.square().sum()
    assert torch.allclose(loss, far / near, atol=1e-12) and loss > 0
    gradients = (torch.autograd.grad(each, list(step.model.backbone.parameters())) for each in (loss, far / near))
    assert all(torch.allclose(a, b, atol=1e-12) and a.any() for a, b in zip(*gradients))


def test_labels_have_no_part_in_it() -> None:
    step = make_step(moved=0.3)
    (loss,) = distil(step, DistilSettings())
    step.batch = Batch(step.batch.images, step.batch.labels.flip(0) + 5, step.batch.ids)
    assert next(distil(step, DistilSettings())) == loss


def test_the_original_never_changes() -> None:
    model = ah.Embedder("test_resnet", 8, size=32, freeze_batchnorm=False)
    companion = original(model, torch.arange(6) // 2, DistilSettings())
    assert not any(p.requires_grad for p in companion.parameters())
    assert not any(m.training for m in companion.modules())
    assert not any("head" in name for name in companion.state_dict())
    images = torch.rand(3, 3, 32, 32)
    before = companion(images)
    assert not before.requires_grad and torch.equal(before, model.eval().features(images))
    for p in model.parameters():
        p.data.add_(1)
    assert torch.equal(companion(images), before)


def some_images(count: int = 40) -> Images:
    labels = torch.arange(count) % 4
    frames = KEY("frames").uniform(torch.arange(count), (8, 8, 1), torch.float32)
    split = ah.Split("some", labels, tuple("abcd"), images=frames)
    return Images(split, resident(frames, "cpu"), labels, None, False)


def test_drift_is_of_held_out_images() -> None:
    images, settings = some_images(), DistilSettings(eps=0.1, holdout=0.3)
    model = ah.Embedder("small", 4, channels=1, size=8)
    companion = original(model, images.labels, settings)
    at_first = drifts(model, companion, images, settings, KEY, nullcontext)
    assert at_first["drift"] == 0 and 0.01 < at_first["drift_attacked"] < 1
    for p in model.parameters():
        p.data.mul_(1.1)
    found = drifts(model, companion, images, settings, KEY, nullcontext)
    held = images.store.images[companion.held].permute(0, 3, 1, 2)  # type: ignore[attr-defined]
    with torch.no_grad():
        first, now = companion(held), model.features(held)
    assert found["drift"] == pytest.approx(((now - first).norm() / first.norm()).item(), rel=1e-5)
    assert found["drift_attacked"] > found["drift"]


@pytest.mark.slow
def test_training_makes_features_stay(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        digits, often = ah.dataset("digits"), {"evaluate_every": 3, "seed": 1}
        natural = {"train": {"epochs": 6, "benign": 1.0, **often}}
        ah.fit(None, digits, "classify", tmp_path / "natural", overrides=natural, device="cpu")
        learnt = {"model": {"weights": str(tmp_path / "natural")}, "train": {"epochs": 6, **often}}
        run = ah.fit(None, digits, "distil", tmp_path / "run", overrides=learnt, device="cpu")
    finally:
        torch.set_num_threads(threads)
    start = ah.load(tmp_path / "natural")
    images = Images(digits.train, resident(digits.train.images, "cpu"), digits.train.labels, None, False)  # type: ignore[arg-type]
    settings = DistilSettings(eps=0.1, alpha=0.05)
    companion = original(start, digits.train.labels, settings)
    first = drifts(start, companion, images, settings, Key.of(1)("look"), nullcontext)
    middle, last = run.metrics()[2], run.metrics()[5]
    assert last["drift_attacked"] < middle["drift_attacked"] < first["drift_attacked"]
    assert last["drift_attacked"] < 0.85 * first["drift_attacked"] and last["drift"] < 0.5 * last["drift_attacked"]
    # What is measured against is the network it began as, not the one it has become.
    found = drifts(ah.load(tmp_path / "run"), companion, images, settings, Key.of(1)("look"), nullcontext)
    assert found == pytest.approx({name: last[name] for name in found}, rel=1e-4)
