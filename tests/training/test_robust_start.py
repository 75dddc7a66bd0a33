"""Class proxies from a robust start: all of a network, its head, or adapters; and a mean along the schedule of ε."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.kills import differing, facts
from torch import Tensor

import anchorhold as ah
from anchorhold.config.recipes import settings_from
from anchorhold.console import Silent
from anchorhold.defences.menu import DEFENCES
from anchorhold.report.collect import read_run
from anchorhold.report.training_page import write_training_page
from anchorhold.runs.folder import Run
from anchorhold.training.forecasting import _evaluated
from anchorhold.training.preparing import build_model

pytestmark = pytest.mark.medium

QUICK: dict[str, Any] = {
    "train": {"epochs": 2, "evaluate_every": 2, "collapse_warmup": 9, "checkpoint_seconds": 0},
    "batch": {"images": 30},
    "optimiser": {"lr": 1e-3},
}
ATTACK = {"steps": 1, "eps": 0.1, "warm": 0.0}
SHORT: dict[str, Any] = {
    "train.epochs": 2,
    "train.evaluate_every": 1,
    "train.on_collapse": "warn",
    "defence.steps": 1,
    "defence.warm": 0.0,
}


@pytest.fixture(scope="module")
def digits() -> ah.Dataset:
    """As RGB images of 32 × 32, which any network of timm takes."""
    whole = ah.dataset("digits")

    def part(split: ah.Split, count: int) -> ah.Split:
        assert split.images is not None
        large = split.images[:count].repeat_interleave(4, 1).repeat_interleave(4, 2).repeat(1, 1, 1, 3)
        return replace(split.keep(torch.arange(count)), images=large)

    return replace(whole, train=part(whole.train, 150), test=part(whole.test, 60))


@pytest.fixture(scope="module", params=["test_resnet", "test_convnext", "test_vit"])
def start(request: pytest.FixtureRequest, digits: ah.Dataset, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Weights from `distil-logits`."""
    model = {"backbone": request.param, "dim": 8, "weights": ""}
    changes = {**QUICK, "model": model, "defence": {"steps": 1}, "train": {"epochs": 1}}
    out = tmp_path_factory.mktemp("start") / "run"
    return ah.fit(None, digits, "distil-logits", out, overrides=changes, device="cpu")


@pytest.mark.parametrize("part", ["all", "head", "lora"])
def test_a_part_of_a_network_trains_on_proxies_from_a_robust_start(
    start: Run, part: str, digits: ah.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ah.load(start.path)
    assert isinstance(before, ah.Embedder)
    model = {"backbone": before.config["backbone"], "dim": 8, "weights": str(start.path), "train": part}
    changes = {**QUICK, "model": model, "defence": {**ATTACK, "awp": 0.01}}
    run = ah.fit(None, digits, "robust", tmp_path / "run", overrides=changes, device="cpu")
    after = ah.load(run.path)
    assert isinstance(after, ah.Embedder)
    own, first = after.backbone.state_dict(), before.backbone.state_dict()
    assert own.keys() == first.keys()  # no adapters are left
    moved = {name for name in own if not torch.equal(own[name], first[name])}
    assert bool(moved) == (part != "head")
    if part == "lora":  # adapters change weight matrices alone
        assert all(own[name].ndim > 1 for name in moved)
    loaded = run.load()
    assert loaded is not None
    assert "companion.proxies" in loaded[0]
    assert run.read_json()["image_steps"] == 2 * 150 and run.metrics()[-1]["divergence"] > 0
    # Killed in the second epoch and resumed, it ends the same.
    known, calls = DEFENCES["proxy"], iter(range(99))

    def dying(step: Any, settings: Any) -> Any:
        if next(calls) == 7:
            raise KeyboardInterrupt
        yield from known(step, settings)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setitem(DEFENCES, "proxy", dying)
        ah.fit(None, digits, "robust", tmp_path / "cut", overrides=changes, device="cpu")
    ah.resume(tmp_path / "cut", data=digits, device="cpu")
    assert torch.equal(ah.load(tmp_path / "cut").head.weight, after.head.weight)
    assert not list(differing(facts(run.path), facts(tmp_path / "cut")))


def test_proxies_that_lose_the_features_they_began_with_are_told_so(tmp_path: Path) -> None:
    """A weight decay of 30 leaves nothing of the weights; the recipe's own leaves them."""
    source = ah.fit(None, "digits", "natural", tmp_path / "start", overrides={"train.epochs": 2}, device="cpu").path
    random = ah.fit(None, "digits", "robust", tmp_path / "random", overrides=SHORT, device="cpu")
    assert "start" not in random.read_json() and "features_r1" not in random.metrics()[-1]
    told = {}
    for name, changes in {
        "good": {},
        "spoilt": {"optimiser.lr": 0.03, "optimiser.weight_decay": 30},
        "head": {"model.train": "head"},
    }.items():
        lines = list[str]()
        report = Silent()
        report.say = lines.append  # type: ignore[method-assign]
        changes = {**SHORT, **changes, "model.weights": str(source)}
        run = ah.fit(None, "digits", "robust", tmp_path / name, overrides=changes, device="cpu", report=report)
        told[name] = run.read_json(), run.metrics(), [line for line in lines if "features" in line]
    (info, rows, lines) = told["good"]
    assert not lines and "flags" not in info and not read_run(tmp_path / "good").lost_features
    assert info["start"]["features_r1"] > 90 and all(row["features_r1"] > 80 for row in rows)
    (info, rows, lines) = told["spoilt"]
    (flag,) = info["flags"]
    assert lines == [f"warning: {flag['text']}"] and flag["name"] == "features" and flag["epoch"] == 1
    assert f"fell from {info['start']['features_r1']:.1f} to {rows[0]['features_r1']:.1f}: " in flag["text"]
    assert "model.train=head" in flag["text"] and "start from that run" not in flag["text"]
    assert read_run(tmp_path / "spoilt").status == "done, features lost"
    assert "The backbone has lost its features" in write_training_page(tmp_path / "spoilt").read_text()
    (info, rows, lines) = told["head"]  # its backbone cannot change
    assert not lines and "start" not in info and "features_r1" not in rows[-1]


def test_features_stay_watched_in_a_run_that_goes_on_with_a_model_of_unknown_origin(
    digits: ah.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ah.fit(None, digits, "natural", tmp_path / "start", overrides={"train.epochs": 1}, device="cpu").path
    settings = settings_from("robust", {**SHORT, "model.weights": str(source), "data.name": "digits"})
    bare = replace(settings, model=replace(settings.model, weights=""))
    known, calls = DEFENCES["proxy"], iter(range(99))

    def dying(step: Any, settings: Any) -> Any:
        if next(calls) == 5:  # in the second epoch
            raise KeyboardInterrupt
        yield from known(step, settings)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setitem(DEFENCES, "proxy", dying)
        ah.fit(build_model(settings, digits), digits, "robust", tmp_path / "run", overrides=SHORT, device="cpu")
    run = ah.resume(tmp_path / "run", model=build_model(bare, digits), data=digits, device="cpu")
    assert [row["features_r1"] > 0 for row in run.metrics()] == [True, True]


def test_a_forecast_counts_the_passes_that_watch_the_features(tmp_path: Path) -> None:
    data = ah.dataset("digits")
    source = ah.fit(None, data, "natural", tmp_path / "start", overrides={"train.epochs": 1}, device="cpu").path
    settings = settings_from("robust", {"model.weights": str(source), "data.name": "digits"})
    bare = replace(settings, model=replace(settings.model, weights=""))
    without, begun = (build_model(each, data) for each in (bare, settings))
    times = -(-settings.train.epochs // settings.train.evaluate_every)
    more = _evaluated(settings, begun, data) - _evaluated(settings, without, data)
    assert more == (times + 1) * len(data.test)


def test_the_mean_along_the_schedule_is_that_of_models_at_every_epsilon(
    digits: ah.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proxies are averaged with the model, and each step from the share on counts the same."""
    weights, proxies, radii = list[Tensor](), list[Tensor](), list[float]()
    known = DEFENCES["proxy"]

    def noting(step: Any, settings: Any) -> Any:
        yield from known(step, settings)
        if step.progress >= 0.3:
            radii.append(settings.at(step.progress).ball.eps)
            weights.append(step.model.head.weight.detach().clone())
            proxies.append(step.companion.proxies.detach().clone())

    monkeypatch.setitem(DEFENCES, "proxy", noting)
    model = {"backbone": "test_resnet", "dim": 8, "weights": ""}
    train = {**QUICK["train"], "mean_from": 0.3}
    changes = {**QUICK, "train": train, "model": model, "defence": {**ATTACK, "warm": 1.0}}
    run = ah.fit(None, digits, "proxy-minmax", tmp_path / "run", overrides=changes, device="cpu")
    assert radii == pytest.approx([0.1 * step / 10 for step in range(3, 10)])  # ten steps; ε grows over all of them
    assert torch.allclose(ah.load(run.path).head.weight, torch.stack(weights).mean(0), atol=1e-6)
    loaded = run.load()
    assert loaded is not None
    (kept,) = [value for name, value in loaded[0].items() if name.startswith("ema") and name.endswith("proxies")]
    assert torch.allclose(kept, torch.stack(proxies).mean(0), atol=1e-6)
