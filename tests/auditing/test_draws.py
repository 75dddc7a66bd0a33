"""Random models: attacked through the mean over their draws, whose number follows from the noise."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anchorhold as ah
from anchorhold.auditing.draws import LEAST_DRAWS, MOST_DRAWS, averaged, draws_needed
from anchorhold.auditing.verifying import verify
from anchorhold.geometry import unit
from anchorhold.model.frozen import embed_all

QUICK: dict[str, Any] = {"limit": 24, "attacks": ["margin"], "protocols": "corrected", "resamples": 20, "device": "cpu"}


class Noisy(nn.Module):
    """Noise on the pixels in every call, as randomised smoothing has it."""

    def __init__(self, inner: nn.Module, sigma: float) -> None:
        super().__init__()
        self.inner, self.sigma = inner, sigma

    def forward(self, images: Tensor) -> Tensor:
        return self.inner(images + self.sigma * torch.randn_like(images))  # type: ignore[no-any-return]


def test_the_number_of_draws_follows_the_noise() -> None:
    torch.manual_seed(0)
    images = torch.rand(16, 1, 4, 4)

    def noisy(sigma: float) -> Any:
        return lambda x: x.flatten(1) + sigma * torch.randn(len(x), 16)

    assert draws_needed(lambda x: x.flatten(1), images) == 1
    assert draws_needed(noisy(1e-7), images) == 1  # as rounding
    few, many = draws_needed(noisy(0.02), images), draws_needed(noisy(0.06), images)
    assert LEAST_DRAWS <= few < many <= MOST_DRAWS and draws_needed(noisy(5.0), images) == MOST_DRAWS
    near = torch.cdist(images.flatten(1), images.flatten(1)).fill_diagonal_(9).amin(1).median()
    wanted = (0.02 * 4 / (0.05 * float(near))) ** 2  # the noise of 16 pixels of 0.02 is 0.08 long
    assert few == pytest.approx(max(wanted, LEAST_DRAWS), rel=0.5)


def test_the_mean_has_the_variance_and_the_sphere_that_it_should() -> None:
    torch.manual_seed(0)
    x = torch.rand(4, 8)
    plain = averaged(lambda e: e + torch.randn_like(e), 25)
    drawn = torch.stack([plain(x) for _ in range(400)])
    assert float(drawn.var(0).mean()) == pytest.approx(1 / 25, rel=0.15)
    ball = averaged(lambda e: unit(e + 0.1 * torch.randn_like(e)), 9)
    assert torch.allclose(ball(x).norm(dim=1), torch.ones(4))
    x.requires_grad_()
    (slope,) = torch.autograd.grad(averaged(lambda e: 2 * e, 5)(x).sum(), x)
    assert torch.allclose(slope, torch.full_like(slope, 2.0))


@pytest.mark.slow
def test_a_random_model_is_attacked_as_hard_as_its_mean(tmp_path: Any) -> None:
    digits = ah.dataset("digits")
    run = ah.fit(None, digits, "natural", tmp_path / "run", overrides={"train.epochs": 4}, device="cpu")
    smooth = ah.wrap(Noisy(ah.load(run.path), 0.1))
    state = torch.get_rng_state()
    found = ah.audit(smooth, digits, eps=0.1, steps=10, **QUICK)
    again = ah.audit(smooth, digits, eps=0.1, steps=10, **QUICK)
    assert torch.equal(state, torch.get_rng_state())
    left = found.protocols["corrected"].columns["margin"].value
    assert left == again.protocols["corrected"].columns["margin"].value  # by the seed
    assert found.model["draws"] > 1 and any("mean over" in note for note in found.notes)
    flag = next(each for each in found.flags if each.name == "not-deterministic")
    assert f"{found.model['draws']} draws" in flag.message
    plain = ah.audit(ah.load(run.path), digits, eps=0.1, steps=10, **QUICK)
    assert "draws" not in plain.model
    # Noise of σ = ε is no defence of this model: its mean is beaten.
    column = found.protocols["corrected"].columns["margin"]
    assert column.initial is not None and left < column.initial - 30
    with torch.no_grad():
        assert not torch.equal(embed_all(smooth, [torch.rand(2, 1, 8, 8)]), embed_all(smooth, [torch.rand(2, 1, 8, 8)]))


def separated(classes: int = 6, each: int = 4) -> tuple[Tensor, Tensor]:
    """Images (3, 4, 4) of classes that lie apart."""
    torch.manual_seed(1)
    centres = torch.rand(classes, 3, 4, 4)
    labels = torch.arange(classes).repeat_interleave(each)
    return (0.5 * centres[labels] + 0.25 + 0.05 * torch.rand(classes * each, 3, 4, 4)).clamp(0, 1), labels


class Answers(nn.Module):
    """A linear model whose vectors get noise in every call."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.noise = nn.Linear(48, 6), noise

    def forward(self, images: Tensor) -> Tensor:
        e = self.inner(images.flatten(1))
        return e + self.noise * torch.randn_like(e)  # type: ignore[no-any-return]


def test_the_r1_of_single_answers_stands_beside_that_of_the_mean() -> None:
    images, labels = separated()
    model = ah.wrap(Answers(0.4), unit=False)
    found = ah.audit(model, (images, labels), eps=0.1, steps=1, **QUICK | {"limit": 0})
    torch.manual_seed(3)
    answers = []
    for _ in range(200):
        with torch.no_grad():
            e = model(images)
        near = torch.cdist(e, e).fill_diagonal_(torch.inf).argmin(1)
        answers.append(float((labels[near] == labels).double().mean()))
    usual, spread = float(torch.tensor(answers).mean()), float(torch.tensor(answers).std())
    assert usual + 0.2 < found.clean["R@1"].value / 100
    single = found.model["single_answers_r1"]
    assert abs(single / 100 - usual) < 4 * spread
    assert any(f"{single:.1f}" in note for note in found.notes)
    assert "not-deterministic" in {flag.name for flag in found.flags}


@pytest.mark.parametrize("noise", [2e-5, 3e-5, 1e-3])
def test_what_is_averaged_is_flagged(noise: float) -> None:
    images, labels = separated()
    found = ah.audit(ah.wrap(Answers(noise), unit=False), (images, labels), eps=0.1, steps=1, **QUICK)
    assert ("draws" in found.model) == ("not-deterministic" in {flag.name for flag in found.flags})


def test_the_worst_of_many_noisy_answers_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anchorhold.auditing.draws.MOST_DRAWS", 4)  # means of so few are noisy, and soon computed
    torch.manual_seed(2)
    images, labels = torch.rand(60, 3, 4, 4), torch.arange(3).repeat(20)  # classes of noise: answers are a toss-up
    model = ah.wrap(Answers(0.05), unit=False)
    harmless: dict[str, Any] = QUICK | {"limit": 0, "strength": "strong", "epsilons": (), "examine": None}
    found = ah.audit(model, (images, labels), eps=1e-7, steps=2, **harmless)
    column = found.protocols["strong"].columns["margin"]
    assert found.strong is not None and column.initial is not None
    luckiest = list(found.strong["after"]["recall"].values())[-1]
    error = 100 * (column.initial / 100 * (1 - column.initial / 100) / len(labels)) ** 0.5
    assert luckiest < column.initial - 2 * error  # the search alone would call that a success
    assert abs(column.value - column.initial) < 1.5 * error
    assert found.receipts is None


def test_a_stopped_audit_of_a_random_model_resumes_with_the_same_numbers(tmp_path: Any) -> None:
    images, labels = separated()
    model = ah.wrap(Answers(0.05), unit=False)
    rest: dict[str, Any] = QUICK | {"eps": 0.1, "steps": 3, "limit": 0, "batch": 8, "examine": None, "epsilons": ()}
    whole = ah.audit(model, (images, labels), **rest | {"attacks": ["margin", "ES"]})
    ah.audit(model, (images, labels), out=tmp_path, **rest | {"attacks": ["margin"]})
    again = ah.audit(model, (images, labels), out=tmp_path, **rest | {"attacks": ["margin", "ES"]})
    for name, column in whole.protocols["corrected"].columns.items():
        assert again.protocols["corrected"].columns[name].value == column.value, name


def test_receipts_of_a_random_model_cannot_be_verified(tmp_path: Any) -> None:
    images, labels = separated()
    still: dict[str, Any] = QUICK | {"eps": 0.1, "steps": 2, "strength": "strong", "epsilons": (), "examine": None}
    ah.audit(ah.wrap(Answers(0.0), unit=False), (images, labels), out=tmp_path / "fixed", **still)
    ah.audit(ah.wrap(Answers(0.1), unit=False), (images, labels), out=tmp_path / "random", **still)
    assert not (tmp_path / "random" / "receipts").exists()
    model = ah.wrap(Answers(0.0), unit=False)
    assert verify(tmp_path / "fixed", model, (images, labels)).problems == ()
    model.module.noise = 0.1  # type: ignore[assignment]
    with pytest.raises(ah.AnchorholdError, match="random"):
        verify(tmp_path / "fixed", model, (images, labels))


def test_one_image_is_attacked_through_the_mean_too() -> None:
    images, labels = separated()
    said: list[str] = []

    class Listener(ah.Console):
        def say(self, text: str) -> None:
            said.append(text)

    model = ah.wrap(Answers(0.1), unit=False)
    state = torch.get_rng_state()
    one = ah.attack(model, "3", (images, labels), "ES", eps=0.1, steps=4, report=Listener())
    two = ah.attack(model, "3", (images, labels), "ES", eps=0.1, steps=4)
    assert torch.equal(state, torch.get_rng_state()) and torch.equal(one.image, two.image)
    assert any("mean over" in line for line in said)
