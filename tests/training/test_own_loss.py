"""Runs with a loss of yours: proxies are trained, saved and resumed; a hardened model is more robust than its start."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anchorhold as ah
from anchorhold.config.recipes import settings_from
from anchorhold.console import Silent
from anchorhold.data.images import load_images
from anchorhold.defences.menu import DEFENCES
from anchorhold.device import computing
from anchorhold.distributed import Ranks
from anchorhold.errors import RunError, SettingsError
from anchorhold.random import Key
from anchorhold.runs.folder import Run
from anchorhold.training.evaluation import evaluate_model
from anchorhold.training.preparing import build_model

PML = "pytorch_metric_learning.losses:"
QUICK: dict[str, Any] = {
    "train": {"epochs": 2, "evaluate_every": 2, "checkpoint_seconds": 0, "collapse_warmup": 9},
    "batch": {"pairs": 32},
    "model": {"backbone": "small", "dim": 8, "weights": ""},
}
STEPS = 2


@pytest.fixture(scope="module")
def digits() -> ah.Dataset:
    """So few digits that an epoch has five steps."""
    whole = ah.dataset("digits")
    return replace(
        whole,
        train=whole.train.keep(torch.arange(len(whole.train)) < 150),
        test=whole.test.keep(torch.arange(len(whole.test)) < 60),
    )


class Proxied(nn.Module):
    """A loss with proxies and a running mean, which draws."""

    middle: Tensor

    def __init__(self, num_classes: int, embedding_size: int, scale: float = 4.0) -> None:
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(num_classes, embedding_size))
        self.register_buffer("middle", torch.zeros(embedding_size))
        self.scale = scale

    def forward(self, e: Tensor, labels: Tensor) -> Tensor:
        self.middle.lerp_(e.detach().mean(0), 0.1)
        noise = 1 + 0.1 * torch.rand(len(e), 1).to(e)
        return nn.functional.cross_entropy(self.scale * noise * (e - self.middle) @ self.proxies.T, labels)


def fit(digits: ah.Dataset, out: Path, recipe: str, defence: dict[str, Any], **more: Any) -> Run:
    sections = {**QUICK, "defence": defence, **more}
    return ah.fit(None, digits, recipe, out, overrides=sections, device="cpu")


def tensors(run: Run) -> dict[str, Tensor]:
    loaded = run.load()
    assert loaded is not None
    return loaded[0]


class Killed(BaseException):
    """As a kill: no `except Exception` stops it."""


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    with monkeypatch.context() as patch:
        for name in ("natural", "madry", "trades", "hardness"):
            patch.setitem(DEFENCES, name, _dying(DEFENCES[name]))
        yield patch


def _dying(known: Any) -> Any:
    calls = iter(range(99))

    def defence(step: Any, settings: Any) -> Any:
        if next(calls) == 7:  # in the second epoch
            raise Killed
        yield from known(step, settings)

    return defence


@pytest.mark.medium
@pytest.mark.parametrize(
    ("recipe", "loss"),
    [
        ("natural", "SoftTripleLoss"),
        ("madry", "ProxyAnchorLoss"),
        ("madry", "MultiSimilarityLoss"),
        ("trades", "ProxyNCALoss"),
        ("hm-lga", "ProxyAnchorLoss"),
        ("hm-lga", "MultiSimilarityLoss"),
    ],
)
def test_a_killed_run_ends_as_one_that_was_left_alone(
    recipe: str, loss: str, digits: ah.Dataset, tmp_path: Path, dying: pytest.MonkeyPatch
) -> None:
    defence = {"loss": f"{PML}{loss}", **({} if recipe == "natural" else {"steps": STEPS})}
    more = {"optimiser": {"schedule": "cosine"}, "train": {**QUICK["train"], "ema": 0.9}}
    with pytest.raises(Killed):
        fit(digits, tmp_path / "cut", recipe, defence, **more)
    dying.undo()
    whole = fit(digits, tmp_path / "whole", recipe, defence, **more)
    torch.rand(3)
    with pytest.raises(RunError, match=rf"allow=\['{PML}{loss}'\]"):
        ah.resume(tmp_path / "cut", data=digits, device="cpu")
    ah.resume(tmp_path / "cut", data=digits, device="cpu", allow=[f"{PML}{loss}"])
    wanted, found = tensors(whole), tensors(Run(tmp_path / "cut"))
    assert wanted.keys() == found.keys() and all(torch.equal(wanted[name], found[name]) for name in wanted)
    assert Run(tmp_path / "cut").metrics()[-1]["loss"] == whole.metrics()[-1]["loss"]
    proxies = [name for name in wanted if name.startswith("companion.loss.")]
    assert bool(proxies) == ("MultiSimilarity" not in loss)
    for name in proxies:
        assert f"optimiser.{name}.exp_avg" in wanted and f"ema.{name}" in wanted


@pytest.mark.medium
def test_a_loss_given_as_an_object_is_trained_in_place_and_given_again(
    digits: ah.Dataset, tmp_path: Path, dying: pytest.MonkeyPatch
) -> None:
    def loss() -> Proxied:
        torch.manual_seed(5)
        return Proxied(5, 8, scale=3.0)

    own, begun = loss(), loss().proxies
    with pytest.raises(Killed):
        fit(digits, tmp_path / "cut", "madry", {"loss": loss(), "steps": STEPS})
    dying.undo()
    whole = fit(digits, tmp_path / "whole", "madry", {"loss": own, "steps": STEPS})
    assert not torch.equal(own.proxies, begun)
    told = whole.read_json()["settings"]["defence"]["loss"]
    assert told == f"{__name__}:Proxied(...)"
    with pytest.raises(RunError, match=r"defence.loss was given as an object, .*own=\{'loss'"):
        ah.resume(tmp_path / "cut", data=digits, device="cpu", allow=[f"{__name__}:Proxied"])
    with pytest.raises(SettingsError, match="give what it began with"):
        ah.resume(tmp_path / "cut", data=digits, device="cpu", own={"loss": nn.MSELoss()})
    again = loss()
    ah.resume(tmp_path / "cut", data=digits, device="cpu", own={"loss": again})
    assert torch.equal(again.proxies, own.proxies) and torch.equal(again.middle, own.middle)
    wanted, found = tensors(whole), tensors(Run(tmp_path / "cut"))
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


@pytest.mark.medium
def test_proxies_have_a_learning_rate_of_their_own(digits: ah.Dataset, tmp_path: Path) -> None:
    ends = {}
    for rate in (0.0, 1e-4, 0.1):
        defence = {"loss": f"{PML}ProxyAnchorLoss", "loss_lr": rate}
        run = fit(digits, tmp_path / str(rate), "natural", defence, train={**QUICK["train"], "epochs": 1})
        ends[rate] = tensors(run)["companion.loss.proxies"]
    assert torch.equal(ends[0.0], ends[0.1])  # 100 × the model's 1e-3
    begun = fit(digits, tmp_path / "still", "natural", {"loss": f"{PML}ProxyAnchorLoss", "loss_lr": 1e-12})
    moved = {rate: (end - tensors(begun)["companion.loss.proxies"]).abs().mean() for rate, end in ends.items()}
    assert 100 < moved[0.1] / moved[1e-4] < 10_000


def test_without_a_loss_of_yours_nothing_is_beside_the_model(digits: ah.Dataset, tmp_path: Path) -> None:
    assert not any(name.startswith("companion.") for name in tensors(fit(digits, tmp_path, "natural", {})))


@pytest.mark.medium
def test_a_module_of_yours_and_a_loss_of_yours(digits: ah.Dataset, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Dropout(0.2), nn.Linear(32, 6))
    defence = {"loss": f"{PML}ProxyAnchorLoss", "steps": STEPS}
    run = ah.fit(net, digits, "madry", tmp_path, overrides={"train": QUICK["train"], "defence": defence}, device="cpu")
    assert tensors(run)["companion.loss.proxies"].shape == (5, 6)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["MultiSimilarityLoss", "ProxyAnchorLoss"])
def test_a_hardened_model_beats_its_start_and_natural_training(loss: str, tmp_path: Path) -> None:
    data, attack = ah.dataset("digits"), {"attack_eps": 0.1, "attack_steps": 10, "attack_queries": 200}
    settings = settings_from("natural", {"data.name": "digits", "train": attack})
    model, cpu = build_model(settings, data), torch.device("cpu")
    test = load_images(data.test, settings.data, cpu, Silent(), Ranks())
    start = evaluate_model(model, test, settings.train, Key.of(0)("look"), computing("fp32", cpu))["r1_attacked"]
    found = {}
    for recipe in ("natural", "madry", "hm-lga"):
        inner = {} if recipe == "natural" else {"eps": 0.15, "alpha": 0.06, "steps": 4}
        overrides = {
            "train": {**attack, "epochs": 5, "evaluate_every": 5},
            "defence": {"loss": f"{PML}{loss}", **inner},
        }
        run = ah.fit(None, data, recipe, tmp_path / recipe, overrides=overrides, device="cpu")
        found[recipe] = run.metrics()[-1]["r1_attacked"]
    for recipe in ("madry", "hm-lga"):
        assert found[recipe] > max(start, found["natural"]) + 5, (start, found)
