"""Adversarial training on labels, against closed forms and against natural training."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anchorhold as ah
from anchorhold.data.images import Images
from anchorhold.data.store import resident
from anchorhold.defences.step import Batch, Step
from anchorhold.pretraining.classify import Classifier, accuracies, classifier, classify
from anchorhold.pretraining.features import Measured
from anchorhold.pretraining.settings import ClassifySettings
from anchorhold.random import Key

KEY = Key.of(3)
LABELS = [3, 3, 9, 9, 3, 3, 9, 9, 9, 9, 3, 3]


def make_step(labels: list[int] = LABELS, model: ah.Embedder | None = None, **changes: Any) -> Step:
    """Images well inside the range of pixels, and a classifier that is not at its beginning."""
    ids, own = torch.arange(len(labels)), torch.tensor(labels)
    model = model or ah.Embedder("small", 16, channels=1, size=3, seed=1).double()
    companion = classifier(model, own, ClassifySettings())
    companion.linear.weight.data = KEY("weight").normal(torch.arange(len(companion.classes)), (model.width,))
    batch = Batch(0.3 + 0.4 * KEY("images").uniform(ids, (1, 3, 3)), own, ids)
    return Step(model=model, batch=batch, epoch=0, epochs=1, key=KEY("step"), state={}, companion=companion, **changes)


def linear_model() -> ah.Embedder:
    """Features are the pixels, so that the classifier is linear in the image."""
    model = ah.Embedder("small", 4, channels=1, size=3).double()
    model.backbone, model.width = nn.Flatten(), 9
    return model


@pytest.mark.parametrize(("norm", "dual"), [("linf", 1), ("l2", 2)])
@pytest.mark.parametrize("start", ["zero", "random"])
def test_two_classes_and_a_linear_network_in_closed_form(
    norm: Literal["linf", "l2"], dual: int, start: Literal["zero", "random"]
) -> None:
    """The worst δ lowers the margin z_y − z_o by ε times the dual norm of w_y − w_o: CE = log(1 + e^(ε‖w‖ − m))."""
    step = make_step(model=linear_model())
    head = step.companion
    assert isinstance(head, Classifier)
    settings = ClassifySettings(eps=0.1, alpha=0.05, steps=40, norm=norm, start=start)
    (loss,) = classify(step, settings)
    kept = ~head.held
    x, y = step.batch.images[kept].flatten(1), (step.batch.labels[kept] == 9).long()
    w = head.linear.weight[y] - head.linear.weight[1 - y]
    expected = F.softplus(0.1 * w.norm(dual, dim=1) - (w * x).sum(1)).mean()
    clean = F.softplus(-(w * x).sum(1)).mean()
    assert torch.allclose(loss, expected, atol=1e-6 if norm == "l2" else 1e-12) and expected > clean + 0.05


def test_the_perturbation_raises_the_loss_of_a_network() -> None:
    step = make_step()
    losses = [
        next(classify(step, ClassifySettings(eps=eps, alpha=eps / 4, steps=8, start="zero")))
        for eps in (0.0, 0.02, 0.1, 0.2)
    ]
    assert losses == sorted(losses) and losses[-1] > losses[0] + 0.01


@pytest.mark.parametrize("start", ["zero", "random"])
def test_without_an_attack_it_is_plain_training(start: Literal["zero", "random"]) -> None:
    step = make_step()
    head = step.companion
    assert isinstance(head, Classifier) and isinstance(step.model, ah.Embedder)
    (loss,) = classify(step, ClassifySettings(eps=0.0, steps=0, start=start))
    kept = ~head.held
    logits = head.linear(step.model.backbone(step.batch.images[kept]))  # mean 0, std 1
    plain = F.cross_entropy(logits, (step.batch.labels[kept] == 9).long())
    parameters = [*step.model.backbone.parameters(), *head.parameters()]
    pairs = zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(plain, parameters))
    assert torch.allclose(loss, plain, atol=1e-12)
    assert all(torch.allclose(a, b, atol=1e-12) and a.any() for a, b in pairs)


def test_the_embedding_head_has_no_part_in_it() -> None:
    step = make_step()
    (loss,) = classify(step, ClassifySettings(eps=0.1))
    loss.backward()
    assert step.model.head.weight.grad is None  # type: ignore[union-attr]
    assert step.companion.linear.weight.grad.any()  # type: ignore[union-attr]


def test_labels_of_any_kind_become_classes() -> None:
    head = classifier(ah.Embedder("small", 4, channels=1), torch.tensor([7, 3, 9, 3, 7]), ClassifySettings())
    assert head.targets(torch.tensor([3, 9, 7, 7])).tolist() == [0, 2, 1, 1]
    assert head(torch.rand(2, 128)).shape == (2, 3) and not head(torch.rand(2, 128)).any()  # nothing is preferred


def test_a_batch_of_one_class_is_no_reason_to_fail() -> None:
    step = make_step([4] * 8)
    (loss,) = classify(step, ClassifySettings())
    assert loss == 0


class Pixels(nn.Module):
    """Features that are right about class 1 by a margin in one pixel: [brightness of pixel 0]."""

    def forward(self, images: Tensor) -> Tensor:
        return images[:, 0, 0, :1]


def test_accuracy_is_of_held_out_images_before_and_under_attack() -> None:
    """A threshold at 0.5 with ε = 0.1: pixels beyond 0.6 stay right, those between may be moved across."""
    value = torch.tensor([0.2, 0.45, 0.55, 0.8, 0.3, 0.7, 0.9, 0.1])
    labels = torch.tensor([0, 0, 1, 1, 1, 1, 0, 0])  # the fifth and the seventh are wrong from the start
    frames = value.view(-1, 1, 1, 1).expand(-1, 2, 2, 1).contiguous()
    split = ah.Split("some", labels, ("a", "b"), images=frames)
    images = Images(split, resident(frames, "cpu"), labels, None, False)
    model = ah.Embedder("small", 4, channels=1, size=2)
    model.backbone, model.width = Pixels(), 1
    settings = ClassifySettings(eps=0.1, alpha=0.05)
    head = classifier(model, labels, settings)
    head.linear.weight.data, head.linear.bias.data = torch.tensor([[-1.0], [1.0]]), torch.tensor([0.5, -0.5])
    head.held[:] = True
    found = accuracies(model, head, images, settings, KEY, nullcontext)
    assert found == {"accuracy": 75.0, "accuracy_attacked": 50.0}
    head.held[:] = torch.tensor([1, 1, 0, 0, 0, 0, 0, 0])
    found = accuracies(model, head, images, settings, KEY, nullcontext)
    assert found == {"accuracy": 100.0, "accuracy_attacked": 50.0}
    still = accuracies(model, head, images, replace(settings, eps=0.0), KEY, nullcontext)
    assert still == {"accuracy": 100.0, "accuracy_attacked": 100.0}


def test_an_image_that_is_wrong_from_the_start_is_not_robust(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cross-entropy of class 0 rises from 0.8 to 1.0 here, and yet class 0 is in front only afterwards."""
    before, after = (torch.tensor([p]).log() for p in ([0.45, 0.55, 0.001], [0.37, 0.315, 0.315]))
    labels = torch.tensor([0])
    found = Measured(before, after, torch.zeros(1, 1, 2, 2), labels)
    monkeypatch.setitem(accuracies.__globals__, "measured", lambda *a: iter([found]))
    model = ah.Embedder("small", 4, channels=1)
    head = classifier(model, torch.tensor([0, 1, 2]), ClassifySettings())
    images = Images(None, None, labels, None, False)  # type: ignore[arg-type]
    assert set(accuracies(model, head, images, ClassifySettings(), KEY, nullcontext).values()) == {0.0}


@pytest.mark.slow
def test_it_learns_and_holds_where_natural_training_does_not(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        digits = ah.dataset("digits")
        robust, natural = (
            ah.fit(
                None,
                digits,
                "classify",
                tmp_path / str(benign),
                overrides={"train": {"epochs": 6, "evaluate_every": 6, "benign": benign}},
                device="cpu",
            ).metrics()[-1]
            for benign in (0.0, 1.0)  # the same, with every batch left unperturbed
        )
    finally:
        torch.set_num_threads(threads)
    assert robust["accuracy"] > 85 and natural["accuracy"] > 85  # chance is 20
    assert robust["accuracy_attacked"] > natural["accuracy_attacked"] + 10
    assert robust["accuracy_attacked"] < robust["accuracy"]
