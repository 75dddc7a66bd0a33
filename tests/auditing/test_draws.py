"""Random models: attacked through the mean over their draws, whose number follows from the noise."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anchorhold as ah
from anchorhold.auditing.draws import LEAST_DRAWS, MOST_DRAWS, averaged, draws_needed
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
