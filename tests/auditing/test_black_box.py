"""Models without a useful gradient: functions audited by queries alone, straight-through steps, and their flags."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import anchorhold as ah
from anchorhold.auditing import members, run
from anchorhold.auditing.one_image import attack as attack_one
from anchorhold.auditing.verifying import verify
from anchorhold.data.splits import Split
from anchorhold.errors import AnchorholdError, ModelError, RunError, SettingsError
from anchorhold.model.wrap import fingerprint_of
from anchorhold.perturb.settings import Budget

QUICK: dict[str, Any] = {"eps": 0.1, "limit": 12, "batch": 12, "device": "cpu", "resamples": 49}


@pytest.fixture(scope="module", autouse=True)
def few_queries() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "BLACK", tuple(replace(m, budget=lambda eps: Budget(25)) for m in members.BLACK))
        yield


@pytest.fixture(scope="module")
def digits() -> Split:
    test = ah.dataset("digits").test
    return test.keep(torch.arange(0, len(test), 4))


@pytest.fixture(scope="module")
def net() -> ah.Embedder:
    return ah.Embedder("small", 16, channels=1, size=8).eval().requires_grad_(False)


class Remote:
    """Arrays in, arrays out, and every image counted."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.asked = net, 0

    def __call__(self, images: np.ndarray) -> np.ndarray:
        assert isinstance(images, np.ndarray) and images.dtype == np.float32 and not torch.is_grad_enabled()
        assert images.min() >= 0 and images.max() <= 1
        self.asked += len(images)
        vectors: np.ndarray = self.net(torch.from_numpy(images)).numpy()
        return vectors


# ---------------------------------------------------------------- functions


def test_what_a_function_may_take_and_return(net: ah.Embedder) -> None:
    images = torch.rand(5, 1, 8, 8)
    wanted = net(images)

    def plain(x: Tensor) -> Tensor:
        assert isinstance(x, Tensor)
        return net(x)

    for function, options in (
        (Remote(net), {"arrays": True}),
        (plain, {}),
        (lambda x: net(x).tolist(), {}),
        (lambda x: {"embedding": net(x).numpy(), "score": 3}, {}),
        (lambda x: [net(x).numpy()], {}),  # as an ONNX session
        (net, {}),
    ):
        model = ah.wrap(function, gradients=False, **options)  # type: ignore[arg-type]
        out = model(images.clone().requires_grad_())
        assert torch.allclose(out, wanted, atol=1e-6) and not out.requires_grad and not model.gradients
    resized = ah.wrap(Remote(net), gradients=False, arrays=True, size=8)
    assert resized(torch.rand(2, 1, 16, 16)).shape == (2, 16)


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (lambda x: x[0], {}, r"returns .* of shape"),
        (lambda x: torch.ones(3, 4), {}, "for a batch of 2"),
        (lambda x: torch.full((len(x), 4), torch.nan), {}, "NaN or infinity for 2 of 2 images"),
        (lambda x: [["a"], ["b"]], {}, "no array of numbers"),
        (lambda x: None, {}, "without a tensor"),
        (lambda x: x.astype(float), {}, "arrays=True"),
        (lambda x: 1 / 0, {}, "fails on images"),
        (7, {}, "a module or a function"),
        (nn.Flatten(), {"arrays": True}, "arrays are for a function"),
        (lambda x: x, {"backward": "identity"}, "backward belongs to the step"),
        (lambda x: x, {"before": lambda x: x, "backward": "identity"}, "leave backward out"),
        (lambda x: x, {"before": 3}, "give a function from images"),
    ],
)
def test_wrong_functions_are_one_line(function: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(AnchorholdError, match=message) as error:
        ah.wrap(function, gradients=False, **options)(torch.rand(2, 1, 8, 8))
    assert "\n" not in str(error.value)


def test_other_uses_are_refused(net: ah.Embedder, digits: Split, tmp_path: Path) -> None:
    model = ah.wrap(Remote(net), gradients=False, arrays=True)
    with pytest.raises(ModelError, match="without gradients cannot be trained"):
        ah.fit(model, ah.dataset("digits"), "natural", tmp_path / "run", device="cpu")
    with pytest.raises(ModelError, match="leave before and backward out"):
        stepped = ah.wrap(nn.Flatten(), before=lambda x: x, backward="identity")
        ah.fit(stepped, ah.dataset("digits"), "natural", tmp_path / "run", device="cpu")
    for method in ("cw", "fgsm"):
        with pytest.raises(SettingsError, match="needs gradients, and the model has none"):
            ah.audit(model, digits, method=method, **QUICK)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="no gradients to transfer from"):
        ah.audit(net, digits, strength="strong", surrogate=model, **QUICK)
    with pytest.raises(ModelError, match=r"ah\.wrap\(function, gradients=False\)"):
        ah.audit(lambda x: x, digits)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"ah\.wrap\(function, gradients=False\)"):
        ah.wrap(lambda x: x)
    with pytest.raises(SettingsError, match="steps must not be negative"):
        ah.audit(model, digits, steps=-1, **QUICK)


def test_fingerprints_tell_functions_apart() -> None:
    one, two = (ah.wrap(f, gradients=False) for f in (lambda x: x + 1, lambda x: x + 2))
    assert fingerprint_of(one) != fingerprint_of(two) and fingerprint_of(one) == fingerprint_of(one)
    plain = ah.wrap(nn.Flatten())
    assert fingerprint_of(plain) == fingerprint_of(ah.wrap(nn.Flatten(), gradients=False))  # the same vectors
    assert fingerprint_of(plain) != fingerprint_of(ah.wrap(nn.Flatten(), before=torch.round))


class Quantised:
    """A step with a setting, and a counter that is private."""

    def __init__(self, count: int) -> None:
        self.count, self._calls = count, 0

    def __call__(self, x: Tensor) -> Tensor:
        self._calls += 1
        return (x * self.count).round() / self.count


class Shifted(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


LEVELS = 7


def test_fingerprints_tell_steps_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))

    def rounded(count: int) -> Any:
        return lambda x: (x * count).round() / count

    def by_default(x: Tensor, count: int = 3) -> Tensor:
        return rounded(count)(x)

    def by_global(x: Tensor) -> Tensor:
        return rounded(LEVELS)(x)

    steps = [
        None,
        lambda x: x,
        lambda x: (x * 7).round() / 7,
        rounded(8),
        rounded(9),
        by_default,
        partial(by_default, count=4),
        by_global,
        Quantised(3),
        Quantised(4),
        Quantised(4).__call__,
        Shifted(0.1),
        Shifted(0.2),
        nn.Identity(),
        nn.Sequential(Shifted(0.1)),
        torch.round,
        torch.floor,
    ]
    marks = [fingerprint_of(ah.wrap(net, before=step)) for step in steps]
    assert len({*marks}) == len(steps) and marks[0] == fingerprint_of(ah.wrap(net))
    ways = ("identity", lambda x: x, lambda x: 2 * x, rounded(8), rounded(9))
    through = [fingerprint_of(ah.wrap(net, before=rounded(8), backward=way)) for way in ways]
    assert len({*through, *marks}) == len(ways) + len(steps)
    again = [fingerprint_of(ah.wrap(net, before=rounded(8), backward=way)) for way in ("identity", rounded(9))]
    assert again == [through[0], through[4]]
    twice = [fingerprint_of(ah.wrap(ah.wrap(net, before=rounded(count)), unit=False)) for count in (8, 9)]
    assert twice[0] != twice[1]
    counting = ah.wrap(net, before=Quantised(3))
    counting(torch.rand(2, 1, 2, 2))
    assert fingerprint_of(counting) == marks[8]  # a private counter is no setting
    monkeypatch.setattr(sys.modules[__name__], "LEVELS", 6)
    assert fingerprint_of(ah.wrap(net, before=by_global)) != marks[7]


def test_the_hash_of_a_step_is_the_same_in_every_process() -> None:
    """Shards, receipts and ranks compare it: no address or order of a set may be part of it."""
    code = """
import sys, numpy, torch, functools
from anchorhold.model.code_hash import hash_of
TABLE = {"a": torch.arange(3), ("b", 2): {"x", "y", 3.5}, "f": len}
class Step:
    def __init__(self):
        self.table, self.kinds, self.me = TABLE, {int, str}, self
    def __call__(self, x):
        return helper(x) * len(TABLE)
def helper(x):
    return x + numpy.pi
def closed(held):
    return lambda x: held and torch.round(x)
odd = [torch, numpy.array([1, "a", None], dtype=object), numpy.float64(2), sys]
step = [closed(odd), Step(), helper, Step().__call__]
print(hash_of(step), hash_of(functools.partial(helper, Step())))
"""
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1


def test_a_stand_in_given_later_is_not_answered_by_old_shards(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 6)).requires_grad_(False)
    data = (torch.rand(24, 3, 4, 4), torch.arange(24) % 3)
    options: dict[str, Any] = {"attacks": ["margin"], "protocols": "corrected", "resamples": 9, "examine": None}
    options |= {"eps": 0.3, "limit": 12, "steps": 30, "device": "cpu"}

    def left(out: Path, replace: bool = False, **step: Any) -> float:
        model = ah.wrap(net, before=lambda x: (x * 3).round() / 3, **step)
        found = ah.audit(model, data, out=out, replace=replace, **options)
        return found.protocols["corrected"].columns["margin"].value

    hidden = left(tmp_path / "one")
    assert left(tmp_path / "one") == hidden
    with pytest.raises(RunError, match="would lose the results of another model"):
        left(tmp_path / "one", backward="identity")
    through = left(tmp_path / "one", replace=True, backward="identity")
    assert through == left(tmp_path / "two", backward="identity") < hidden


@pytest.mark.slow
def test_a_function_is_audited_by_queries_alone(net: ah.Embedder, digits: Split, tmp_path: Path) -> None:
    remote = Remote(net)
    model = ah.wrap(remote, gradients=False, arrays=True)
    found = ah.audit(model, digits, steps=30, out=tmp_path, **QUICK)
    told = json.loads((tmp_path / "audit.json").read_text())
    assert told["settings"]["method"] == "square" and told["settings"]["steps"] == 30
    assert told["model"]["gradients"] is False and told["model"]["kind"] == "Remote"
    assert any("without gradients: square, up to 30 queries" in note for note in told["notes"])
    assert [flag.value for flag in found.flags if flag.name == "no-gradients"] == [30.0]  # type: ignore[attr-defined]
    blind = {"zero-gradient", "steps-do-not-hurt", "noise-as-strong", "black-box-beats-white-box"}
    assert not blind & {flag.name for flag in found.flags}
    corrected = found.protocols["corrected"]
    assert corrected.ers is not None and found.protocols["published"].ers is None
    assert corrected.columns["ES:D"].value > 0 and "30 queries each" in str(found)
    # All that is counted was asked; besides, the clean images and each result are embedded once or twice.
    assert 0 < found.image_steps <= remote.asked
    # The same model with gradients and the same method: the same numbers.
    same = ah.audit(net, digits, method="square", steps=30, examine=None, **QUICK)
    for name, column in corrected.columns.items():
        assert column.value == pytest.approx(same.protocols["corrected"].columns[name].value, abs=0.5), name


@pytest.mark.slow
def test_a_strong_audit_of_a_function_has_square_and_nes(net: ah.Embedder, digits: Split, tmp_path: Path) -> None:
    model = ah.wrap(Remote(net), gradients=False, arrays=True)
    options: dict[str, Any] = {**QUICK, "attacks": ["GTM", "QA+"], "steps": 20}
    found = ah.audit(model, digits, strength="strong", epsilons=[0.05], out=tmp_path, **options)
    assert found.strong is not None and found.strong["members"] == ["square", "nes"]
    assert found.strong["image_steps"] == 0 and found.strong["queries"] > 0
    assert not {"black", "transfer"} & set(found.strong["doubts"])
    assert "black-box-beats-white-box" not in {flag.name for flag in found.flags}
    curve = found.curve["lines"]["R@1"]  # type: ignore[index]
    assert curve == sorted(curve, reverse=True)
    assert not verify(tmp_path, model, digits, device="cpu").problems
    transferred = ah.audit(model, digits, strength="strong", surrogate=net, examine=None, **options)
    assert transferred.strong is not None and transferred.strong["members"] == ["transfer", "square", "nes"]


@pytest.mark.medium
@pytest.mark.parametrize("method", ["square", "nes"])
def test_one_image_is_attacked_without_gradients(net: ah.Embedder, digits: Split, method: str) -> None:
    model = ah.wrap(Remote(net), gradients=False, arrays=True)
    options: dict[str, Any] = {"eps": 0.1, "steps": 40, "device": "cpu"}
    done = attack_one(model, "3", digits, "ES", method=method, **options)  # type: ignore[arg-type]
    assert done.measures["ES:D"][1] > done.measures["ES:D"][0]
    if method == "square":  # pgd, the default, becomes square
        assert attack_one(model, "3", digits, "ES", **options).measures == done.measures


# ---------------------------------------------------------------- straight-through steps


def levels(x: Tensor) -> Tensor:
    """Eight levels of grey."""
    return (x * 7).round() / 7


def test_the_forward_pass_is_exact_and_the_backward_that_of_the_stand_in() -> None:
    inner = nn.Sequential(nn.Flatten(), nn.Linear(64, 6))
    x, above = torch.rand(3, 1, 8, 8), torch.rand(3, 6)
    true = ah.wrap(inner, unit=False)(levels(x))

    def gradient(backward: Any, where: Tensor) -> tuple[Tensor, Tensor]:
        here = where.clone().requires_grad_()
        out = ah.wrap(inner, before=levels, backward=backward, unit=False)(here)
        (found,) = torch.autograd.grad(out, here, above)
        return out, found

    weight = (above @ inner[1].weight).reshape(3, 1, 8, 8)  # type: ignore[operator]
    out, straight = gradient("identity", x)
    assert torch.equal(out, true) and torch.allclose(straight, weight)
    out, doubled = gradient(lambda images: 2 * images, x)
    assert torch.equal(out, true) and torch.allclose(doubled, 2 * weight)
    out, none = gradient(None, x)
    assert torch.equal(out, true) and not none.any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"before": lambda x: x[:, :, :4], "backward": "identity"}, "it must return floats of that shape"),
        ({"before": lambda x: (255 * x).byte(), "backward": "identity"}, "it must return floats of that shape"),
        ({"before": lambda x: x.numpy(), "backward": "identity"}, "before returns"),
        ({"before": lambda x: 1 / 0, "backward": "identity"}, "before fails on images"),
        ({"before": levels, "backward": "jpeg"}, "give 'identity' or a differentiable function"),
        ({"before": levels, "backward": lambda x: x.detach()}, "without a gradient"),
        ({"backward": "identity"}, "backward belongs to the step"),
    ],
)
def test_wrong_steps_are_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(AnchorholdError, match=message) as error:
        ah.wrap(nn.Flatten(), **options)(torch.rand(2, 1, 8, 8).requires_grad_())
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_quantised_model_is_caught_by_flags_and_beaten_by_bpda(tmp_path: Path) -> None:
    """Its own gradients are zero, so that it looks robust; a straight-through gradient beats it as its own model."""
    data = ah.dataset("digits")
    ah.fit(None, data, "natural", tmp_path / "run", overrides={"train": {"epochs": 4}}, device="cpu")
    net = ah.load(tmp_path / "run")
    options: dict[str, Any] = {"eps": 0.15, "alpha": 0.02, "steps": 20, "limit": 60, "batch": 60, "device": "cpu"}
    options |= {"attacks": ["margin"], "protocols": ["corrected"], "resamples": 49}
    plain, hidden, through = (
        ah.audit(model, data, **options)
        for model in (net, ah.wrap(net, before=levels), ah.wrap(net, before=levels, backward="identity"))
    )
    left = [found.protocols["corrected"].columns["margin"].value for found in (plain, hidden, through)]
    assert hidden.protocols["corrected"].columns["margin"].initial == pytest.approx(left[1])  # nothing fell
    assert left[1] - left[0] > 50 and abs(left[2] - left[0]) < 12
    assert "zero-gradient" in {flag.name for flag in hidden.flags}
    assert "zero-gradient" not in {flag.name for flag in through.flags}
    assert any("BPDA" in note and "levels" in note for note in through.notes) and not any(
        "BPDA" in note for note in hidden.notes
    )
    queries = {**options, "steps": 300, "alpha": None}
    black = ah.audit(ah.wrap(net, before=levels, gradients=False), data, **queries)
    assert black.protocols["corrected"].columns["margin"].value < left[1] - 30
