"""Gradients and embeddings that are not finite: no crash, no silent robustness, and no effect on other samples."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anchorhold as ah
from anchorhold.auditing.result import Audit
from anchorhold.perturb.ascend import ascend
from anchorhold.perturb.ball import Ball
from anchorhold.perturb.cw import carlini_wagner, smallest_l2
from anchorhold.perturb.problem import Objective, Problem
from anchorhold.perturb.settings import Budget
from anchorhold.random import Key

KEY = Key.of(3)


def base() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 6)).requires_grad_(False)


def levels(count: int = 60) -> tuple[Tensor, Tensor]:
    """8-bit images of three classes that are easy to tell apart."""
    torch.manual_seed(1)
    labels = torch.arange(count) % 3
    images = torch.rand(3, 3, 4, 4)[labels] + 0.15 * torch.randn(count, 3, 4, 4)
    return (images.clamp(0, 1) * 255).round() / 255, labels


class Rooted(nn.Module):
    """The same vectors, with the gradient of a root at 0: everywhere, or where the first pixel is dark."""

    def __init__(self, everywhere: bool = True) -> None:
        super().__init__()
        self.base, self.everywhere = base(), everywhere

    def forward(self, x: Tensor) -> Tensor:
        bright = torch.zeros(len(x), 1) if self.everywhere else (x[:, 0, 0, :1] > 0.5).to(x)
        return self.base(x) + ((0 * x).flatten(1).square().sum(1, keepdim=True) + bright).sqrt() - bright


class Broken(nn.Module):
    """NaN for images that are not of 8 bits, with sound gradients elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.base = base()

    def forward(self, x: Tensor) -> Tensor:
        changed = ((255 * x - (255 * x).round()).abs() > 0.01).flatten(1).any(1, keepdim=True)
        return self.base(x).masked_fill(changed, torch.nan)


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("rule", ["steepest", "apgd", "adam", "momentum"])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_one_broken_gradient_stops_nobody_else(norm: str, rule: str, wrong: float) -> None:
    images, net = levels(6)[0].double()[:, None], base().double()

    def value(e: Tensor, positions: Tensor) -> Tensor:
        factor = torch.ones(len(e), dtype=e.dtype)
        factor[positions == 2] = wrong  # in the gradient of one unit
        return _Scaled.apply(e.sum((1, 2)), factor)  # type: ignore[no-any-return]

    step = {} if rule == "apgd" else {"alpha": 0.03}
    ball = Ball(0.1, norm)  # type: ignore[arg-type]
    budget = Budget(6, rule=rule, keep="last" if rule == "steepest" else "best", **step)  # type: ignore[arg-type]
    sound = ascend(Problem(net, Objective(lambda e, at: e.sum((1, 2))), ball, budget, KEY), images).images
    found = ascend(Problem(net, Objective(value), ball, budget, KEY), images).images
    others = torch.arange(6) != 2
    assert torch.equal(found[others], sound[others]) and found.isfinite().all()
    if norm == "l2" or wrong != wrong or rule in ("adam", "momentum"):
        assert torch.equal(found[2], images[2])  # its gradient counts as zero


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, None]:
        return above * ctx.saved_tensors[0], None


def test_one_broken_gradient_stops_nobody_else_in_carlini_wagner() -> None:
    images, net = levels(6)[0].double(), base().double()
    broken = torch.tensor([False, True, False, False, False, False])

    def value(e: Tensor, positions: Tensor) -> Tensor:
        factor = torch.where(broken[positions], torch.nan, 1.0).double()
        return _Scaled.apply(e.sum((1, 2)) - 0.2, factor)  # type: ignore[no-any-return]

    def both(objective: Objective) -> tuple[Tensor, Tensor]:
        near, _ = smallest_l2(net, images, objective.value, steps=5, searches=1)
        return carlini_wagner(Problem(net, objective, Ball(0.1), Budget(5), KEY), images[:, None]).images[:, 0], near

    sound = both(Objective(lambda e, at: e.sum((1, 2)) - 0.2))
    for found, wanted in zip(both(Objective(value)), sound):
        assert torch.equal(found[~broken], wanted[~broken]) and found.isfinite().all()


def audited(model: nn.Module, norm: str = "linf", **more: Any) -> Audit:
    threat = ah.Threat(eps=0.3 if norm == "linf" else 1.0, norm=norm, steps=4)  # type: ignore[arg-type]
    options: dict[str, Any] = {"attacks": ["margin"], "protocols": "corrected", "limit": 12, "resamples": 9, **more}
    return ah.audit(ah.wrap(model), levels(), threat=threat, device="cpu", **options)


@pytest.mark.medium
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_an_audit_goes_on_and_flags_gradients_that_are_not_finite(norm: str) -> None:
    found = audited(Rooted(), norm)
    flags = {flag.name: flag for flag in found.flags}
    assert flags["zero-gradient"].message.startswith("gradients are not finite for 100% of the queries")
    assert found.protocols["corrected"].columns["margin"].value == 100
    half, sound = audited(Rooted(everywhere=False), norm, examine=None), audited(base(), norm, examine=None)
    alive = levels()[0][half.runs[0].ids][:, 0, 0, 0] > 0.5
    if norm == "l2":  # the others are attacked as ever, and these stand still
        for run, other in zip(half.runs, sound.runs):
            assert torch.allclose(run.shift[alive], other.shift[alive]) and alive.any()
            assert run.shift[~alive].max() < 1e-5 and not alive.all()


@pytest.mark.medium
def test_nan_for_changed_images_is_rejected_and_flagged() -> None:
    found = audited(Broken(), attacks=["margin", "GTM", "QA-", "ES"], epsilons=[0.1, 0.3])
    assert found.flags[0].name == "nan-embeddings" and "100.0% of the samples" in found.flags[0].message
    assert {run.rejected for run in found.runs} == {12}
    assert found.curve is not None and found.curve["doubts"]["rejected"] == 100
    assert found.curve["lines"]["R@1"] == [100.0] * 3
    assert all(torch.equal(run.examples["clean"], run.examples["perturbed"]) for run in found.runs)
    sound = audited(base(), attacks=["margin", "GTM", "QA-", "ES"], epsilons=[0.3])
    assert "nan-embeddings" not in {flag.name for flag in sound.flags} and {run.rejected for run in sound.runs} == {0}
    assert sound.curve is not None and "rejected" not in sound.curve["doubts"]


@pytest.mark.medium
def test_nan_for_changed_images_does_not_stop_a_strong_audit(tmp_path: Any) -> None:
    found = audited(Broken(), attacks=["GTM"], strength="strong", epsilons=(), limit=6, examine=None, out=tmp_path)
    assert found.strong is not None and found.strong["doubts"]["rejected"] == 100
    again = audited(Broken(), attacks=["GTM"], strength="strong", epsilons=(), limit=6, examine=None, out=tmp_path)
    assert again.to_dict()["protocols"] == found.to_dict()["protocols"]
