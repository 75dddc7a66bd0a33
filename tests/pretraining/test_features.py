"""What both pretrainings promise: held-out images stay out, runs resume, the backbone is what others start from."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anchorhold as ah
from anchorhold.cli import main as cli
from anchorhold.console import Advance, Silent
from anchorhold.data.images import Images
from anchorhold.defences.step import Batch, Step
from anchorhold.errors import SettingsError
from anchorhold.metrics import evaluate
from anchorhold.model.frozen import frozen
from anchorhold.pretraining import features as pretrain
from anchorhold.pretraining.classify import Classifier
from anchorhold.pretraining.features import Companion, Through
from anchorhold.pretraining.menu import PRETRAININGS
from anchorhold.pretraining.settings import SETTINGS, PretrainSettings
from anchorhold.random import Key
from anchorhold.report.training_page import write_training_page
from anchorhold.runs.folder import Run

pytestmark = pytest.mark.medium

KEY = Key.of(5)
BOTH = pytest.mark.parametrize("recipe", ["classify", "distil"])


@pytest.fixture(scope="module")
def digits() -> ah.Dataset:
    return ah.dataset("digits")


def fit(digits: ah.Dataset, out: Path, recipe: str, **sections: dict[str, Any]) -> Run:
    quick = {"train": {"epochs": 1, "evaluate_every": 1, **sections.pop("train", {})}}
    return ah.fit(None, digits, recipe, out, overrides={**quick, **sections}, device="cpu")


def tensors(run: Run) -> dict[str, torch.Tensor]:
    """Model, companion and optimiser as the last checkpoint holds them."""
    loaded = run.load()
    assert loaded is not None
    return loaded[0]


def same(a: Run, b: Run) -> bool:
    first, second = tensors(a), tensors(b)
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@BOTH
def test_an_evaluation_says_how_well_the_features_retrieve(digits: ah.Dataset, tmp_path: Path, recipe: str) -> None:
    """The head is not trained and must not be seen; what is seen is what the saved model's features give."""
    run = fit(digits, tmp_path / "run", recipe, train={"attack_eps": 0.05, "attack_queries": 100})
    row = run.metrics()[-1]
    model, test = ah.load(tmp_path / "run"), digits.test
    assert test.images is not None and "r1" not in row
    pixels = test.images.permute(0, 3, 1, 2).float() / 255
    with torch.no_grad():
        features = nn.functional.normalize(model.features(pixels), dim=1)
        other = nn.functional.normalize(model(pixels), dim=1)
    expected, embedded = (100 * evaluate(e, test.labels).r1 for e in (features, other))
    assert row["features_r1"] == pytest.approx(expected, abs=0.2) and abs(expected - embedded) > 1
    assert 0 < row["features_r1_attacked"] < row["features_r1"]
    assert {"features_r2", "features_map_r"} <= row.keys()


class Heard(Silent):
    """What was said, and the page as it stood while the run went on."""

    def __init__(self, run: Path) -> None:
        self.run, self.said, self.pages = run, list[str](), list[str]()

    def say(self, text: str) -> None:
        self.said.append(text)

    @contextmanager
    def task(self, name: str, total: int, done: int = 0) -> Iterator[Advance]:
        yield lambda done, note="": self.pages.append(write_training_page(self.run).read_text())


@pytest.mark.slow
@BOTH
def test_lost_features_are_said_once(digits: ah.Dataset, tmp_path: Path, recipe: str) -> None:
    start = ah.Embedder("small", 64, channels=1, size=8)
    assert digits.test.images is not None
    with torch.no_grad():
        features = nn.functional.normalize(start.features(digits.test.images.permute(0, 3, 1, 2).float() / 255), dim=1)
    at_first = 100 * evaluate(features, digits.test.labels).r1
    for name, lr in (("kept", 1e-4), ("lost", 0.3)):
        heard = Heard(tmp_path / name)
        overrides = {"train": {"epochs": 3, "evaluate_every": 1}, "optimiser": {"lr": lr}}
        run = ah.fit(None, digits, recipe, tmp_path / name, overrides=overrides, device="cpu", report=heard)
        info, now = run.read_json(), [row["features_r1"] for row in run.metrics()]
        assert info["start"]["features_r1"] == pytest.approx(at_first, abs=0.2) and "features_map_r" in info["start"]
        lost = name == "lost"
        assert all((r1 < at_first / 2) == lost for r1 in now)
        said = [text for text in heard.said if text.startswith("warning: by epoch 1 R@1 of the features fell from")]
        assert len(said) == lost and all("defence.eps" in text and "start from that run" in text for text in said)
        assert [flag["name"] for flag in info.get("flags", [])] == ["features"] * lost
        page = write_training_page(run.path).read_text()
        assert ("The backbone has lost its features" in page) == lost
        assert "The run is in progress" in heard.pages[-1] and "The run is in progress" not in page


@pytest.mark.slow
@BOTH
def test_held_out_images_have_no_influence(digits: ah.Dataset, tmp_path: Path, recipe: str) -> None:
    held = Companion(digits.train.labels, 0.1).held
    assert 0.05 < held.double().mean() < 0.15
    assert digits.train.images is not None

    def changed(which: torch.Tensor) -> ah.Dataset:
        other = torch.where(which.view(-1, 1, 1, 1), 255 - digits.train.images, digits.train.images)  # type: ignore[operator]
        return replace(digits, train=replace(digits.train, images=other))

    kept = torch.zeros_like(held)
    kept[(~held).nonzero()[0]] = True
    plain, without, within = (
        fit(data, tmp_path / name, recipe) for name, data in (("a", digits), ("b", changed(held)), ("c", changed(kept)))
    )
    assert same(plain, without) and not same(plain, within)
    name = {"classify": "accuracy", "distil": "drift"}[recipe]
    assert plain.metrics()[-1][name] != without.metrics()[-1][name]  # but they are what is evaluated


def test_the_same_images_are_held_out_whatever_the_run() -> None:
    labels = torch.arange(200) % 7
    held = Companion(labels, 0.3).held
    assert torch.equal(held[:50], Companion(labels[:50], 0.3).held)  # by id alone
    assert Companion(torch.tensor([0, 1]), 0.001).held.sum() == 1  # an evaluation needs an image
    for share in (0.0, 1.0, -0.1):
        with pytest.raises(SettingsError, match="holdout"):
            PretrainSettings(holdout=share)


@pytest.mark.slow
@BOTH
def test_an_untrained_head_is_no_collapse(digits: ah.Dataset, tmp_path: Path, recipe: str) -> None:
    strict = {"epochs": 3, "collapse_warmup": 0, "collapse_separability": 1e9}
    run = fit(digits, tmp_path / "run", recipe, train=strict)
    assert run.read_json()["status"] == "done" and "separability" not in run.metrics()[-1]
    start = ah.Embedder("small", 64, channels=1, size=8)
    trained = ah.load(run.path)
    assert torch.equal(start.head.weight, trained.head.weight)
    assert not torch.equal(start.backbone[0].weight, trained.backbone[0].weight)


@pytest.mark.slow
@BOTH
def test_from_the_command_line_to_the_next_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    def command(*words: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["anchorhold", "train", "digits", *words, "--epochs", "1", "--device", "cpu"])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert not stop.value.code
        return capsys.readouterr()

    monkeypatch.chdir(tmp_path)
    out, err = command("--recipe", recipe, "--out", "pre")
    word = {"classify": "accuracy", "distil": "drift"}[recipe]
    assert word in out and "under attack" in out and "on held-out images after 1 epoch" in out and word in err
    assert "next: anchorhold train DATA --weights pre" in out and "mAP@R" not in out
    assert (
        "of the backbone features on the test images, without a head, after 1 epoch" in out and "R@1 of features" in err
    )
    spoilt, _ = command("--recipe", recipe, "--out", "spoilt", "--set", "optimiser.lr=0.3")
    assert "features fell from 98.0 to " in spoilt and "next:" not in spoilt and "fell from" not in out
    for place, name in (("pre", "a"), ("pre/model.safetensors", "b")):
        _, err = command("--recipe", "natural", "--weights", place, "--out", name, "--set", "optimiser.lr=1e-30")
        assert "weights: pre/model.safetensors, 8 tensors of the backbone loaded, 4 others ignored" in err
        report = Run(tmp_path / name).read_json()["model"]["weights"]
        assert report["source"] == "pre/model.safetensors" and len(report["sha256"]) == 16
        assert report["sha256"] == Run(tmp_path / "pre").read_json()["export"]
        first, second = (ah.load(tmp_path / each).backbone.state_dict() for each in ("pre", name))
        assert all(torch.allclose(first[k], second[k]) for k in first)


def live_step(recipe: str, **config: Any) -> Step:
    """A step on a network with live BatchNorm."""
    model = ah.Embedder("test_resnet", 8, size=32, freeze_batchnorm=False, seed=2).train()
    labels, ids = torch.tensor([4, 4, 2, 2, 7, 7, 4, 4]), torch.arange(8)
    batch = Batch(KEY("images").uniform(ids, (3, 32, 32), torch.float32), labels, ids)
    defence = PRETRAININGS[recipe]
    companion = defence.companion(model, labels, SETTINGS[recipe]())
    if isinstance(companion, Classifier):
        nn.init.normal_(companion.linear.weight)
    return Step(model=model, batch=batch, epoch=0, epochs=1, key=KEY, state={}, companion=companion, **config)


@BOTH
@pytest.mark.parametrize("noise", [0.0, 30.0])
def test_the_canary_sees_what_the_attack_sees(recipe: str, noise: float) -> None:
    """Features or logits, not embeddings: the same ascent a second time lacks nothing, a spoilt one does."""

    class Spoilt(Step):
        @contextmanager
        def frozen(self) -> Iterator[Any]:
            with super().frozen() as embed:
                yield lambda x: embed(x) + noise * torch.sin(1e3 * x.flatten(1).sum(1, keepdim=True))

    logged: dict[str, float] = {}
    step = live_step(recipe, canary=True, log=lambda name, value, weight=1.0: logged.update({name: float(value)}))
    defence = PRETRAININGS[recipe]
    list(defence.run(Spoilt(**vars(step)), SETTINGS[recipe](eps=0.05, alpha=0.02)))
    assert (abs(logged["canary_gap"]) < 1e-5) == (noise == 0)


@BOTH
def test_the_attack_leaves_no_trace_in_the_network(recipe: str) -> None:
    step = live_step(recipe)
    norms = [m for m in step.model.modules() if isinstance(m, nn.BatchNorm2d)]
    before = [m.training for m in step.model.modules()]
    (loss,) = PRETRAININGS[recipe].run(step, SETTINGS[recipe](eps=0.1, alpha=0.05, steps=4))
    assert all(p.grad is None for p in step.model.parameters())
    assert [m.training for m in step.model.modules()] == before and norms[0].training
    assert all(int(m.num_batches_tracked) == 1 for m in norms)  # the training pass alone
    loss.backward()
    backbone = step.model.backbone
    assert all(p.grad is not None and p.grad.isfinite().all() for p in backbone.parameters())  # type: ignore[union-attr]


def test_the_folded_view_is_the_network() -> None:
    step = live_step("classify")
    for m in step.model.modules():
        if isinstance(m, nn.BatchNorm2d):
            nn.init.uniform_(m.running_var, 0.5, 2)  # type: ignore[arg-type]
    network = Through(step.model, step.companion)
    with frozen(network) as view:
        seen = view(step.batch.images)
    assert network.folded() is not None
    torch.testing.assert_close(seen, network.eval()(step.batch.images), rtol=1e-4, atol=1e-5)
    features = step.model.backbone((step.batch.images - step.model.mean) / step.model.std)  # type: ignore[operator]
    torch.testing.assert_close(step.companion.linear(features), seen, rtol=1e-4, atol=1e-5)  # type: ignore[union-attr, operator]


def test_a_batch_that_is_held_out_trains_nothing() -> None:
    step = live_step("classify")
    step.companion.held[:] = True  # type: ignore[union-attr, index, operator]
    assert list(PRETRAININGS["classify"].run(step, SETTINGS["classify"]())) == []


def test_an_evaluation_takes_a_sample_and_more_steps_than_training(
    digits: ah.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anchorhold.data.store import resident
    from anchorhold.pretraining.distil import raise_drift

    monkeypatch.setattr(pretrain, "EVALUATED", 7)
    climbed: list[int] = []
    ascend = pretrain.ascend
    monkeypatch.setattr(
        pretrain, "ascend", lambda *a, **k: climbed.append((found := ascend(*a, **k)).image_steps) or found
    )
    images = Images(digits.train, resident(digits.train.images, "cpu"), digits.train.labels, None, False)  # type: ignore[arg-type]
    network = Through(ah.Embedder("small", 8, channels=1, size=8))
    held = Companion(digits.train.labels, 0.1).held

    def labels_of(key: Key, settings: PretrainSettings) -> torch.Tensor:
        goal = lambda views, labels: raise_drift(network(views).detach())  # noqa: E731
        (found,) = pretrain.measured(network, held, images, goal, settings, key, nullcontext)
        assert len(found.views) == len(found.labels) == 7
        return found.labels

    first = labels_of(KEY, PretrainSettings(eps=0.1, steps=3))
    assert climbed == [7 * 20]
    assert torch.equal(first, labels_of(KEY, PretrainSettings(eps=0.1, steps=30))) and climbed[1] == 7 * 60
    assert any(not torch.equal(first, labels_of(KEY(i), PretrainSettings(eps=0.1))) for i in range(3))
