"""Soft labels: perturbed images keep the answers of the first network, with the classifier that its weights have."""

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import anchorhold as ah
from anchorhold.data.images import Images
from anchorhold.data.store import resident
from anchorhold.defences.step import Batch, Step
from anchorhold.errors import SettingsError
from anchorhold.model.classifier import classifier_of
from anchorhold.pretraining.menu import PRETRAININGS, Pretraining
from anchorhold.pretraining.settings import DistilLogitsSettings
from anchorhold.pretraining.soft_labels import Teacher, agreements, distil_logits, teacher, with_logits
from anchorhold.random import Key
from anchorhold.runs.folder import Run
from tests.pretraining.test_distil import some_images

KEY = Key.of(6)
COUNT = 5


def weights_file(place: Path, prefix: str = "", head: str = "fc", bias: bool = True, size: int = 8) -> Path:
    """A file with the backbone `small` and a classifier, as others save them."""
    model = ah.Embedder("small", 0, channels=1, size=size, seed=3)
    tensors = {f"{prefix}{name}": value.clone() for name, value in model.backbone.state_dict().items()}
    tensors[f"{prefix}{head}.weight"] = KEY("weight").normal(torch.arange(COUNT), (model.width,), torch.float32)
    if bias:
        tensors[f"{prefix}{head}.bias"] = KEY("bias").normal(torch.arange(COUNT), (), torch.float32)
    save_file(tensors, place / "weights.safetensors")
    return place / "weights.safetensors"


def embedder(source: Path | None, dim: int = 4) -> ah.Embedder:
    return ah.Embedder("small", dim, source, channels=1, size=8)


def make_step(source: Path | None, settings: DistilLogitsSettings, moved: float = 0.0) -> tuple[Step, Any]:
    model = embedder(source).double()
    settings = with_logits(settings, model)
    labels = torch.arange(12) // 2 % 3
    companion = teacher(model, labels, settings)
    for number, p in enumerate(model.parameters()):
        noise = KEY("noise", number).normal(torch.arange(p.numel()), (), p.dtype).reshape(p.shape)
        p.data += moved * noise * p.data.std(correction=0)
    batch = Batch(0.3 + 0.4 * KEY("images").uniform(torch.arange(12), (1, 8, 8)), labels, torch.arange(12))
    step = Step(model=model, batch=batch, epoch=0, epochs=1, key=KEY("step"), state={}, companion=companion)
    return step, settings


# The classifier of the weights -------------------------------------------------------------------------------


@pytest.mark.parametrize(("prefix", "head"), [("", "fc"), ("module.model.", "fc"), ("", "head.fc"), ("", "classifier")])
@pytest.mark.parametrize("bias", [True, False])
def test_the_classifier_of_a_file_is_found(tmp_path: Path, prefix: str, head: str, bias: bool) -> None:
    found = classifier_of(embedder(weights_file(tmp_path, prefix, head, bias)))
    assert found is not None
    assert torch.equal(found.weight, KEY("weight").normal(torch.arange(COUNT), (128,), torch.float32))
    assert bool(found.bias.any()) == bias and found.bias.shape == (COUNT,)


def test_a_head_that_makes_embeddings_is_no_classifier(tmp_path: Path) -> None:
    embedder(None, 16).save(tmp_path / "own.safetensors")
    assert classifier_of(embedder(tmp_path / "own.safetensors")) is None
    assert classifier_of(embedder(None)) is None
    assert with_logits(DistilLogitsSettings(), embedder(None)).logits == 0


def test_another_number_of_logits_is_refused(tmp_path: Path) -> None:
    model = embedder(weights_file(tmp_path))
    assert with_logits(DistilLogitsSettings(), model).logits == COUNT
    with pytest.raises(SettingsError, match="with 5 logits"):
        with_logits(DistilLogitsSettings(logits=7), model)


# The loss ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("classifier", [True, False])
def test_the_loss_of_clean_images_by_hand(tmp_path: Path, temperature: float, classifier: bool) -> None:
    source = weights_file(tmp_path) if classifier else None
    chosen = DistilLogitsSettings(eps=0.0, steps=0, temperature=temperature)
    step, settings = make_step(source, chosen, moved=0.3)
    assert isinstance(step.companion, Teacher) and isinstance(step.model, ah.Embedder)
    (found,) = distil_logits(step, settings)
    tail = step.companion.linear
    images = step.batch.images[~step.companion.held]
    assert 0 < len(images) < 12
    pairs = [(tail(net.features(images)) / temperature).tolist() for net in (step.companion.embedder, step.model)]
    assert len(pairs[0][0]) == (COUNT if classifier else 128)

    def softmax(row: list[float]) -> list[float]:
        powers = [math.exp(each) for each in row]
        return [each / sum(powers) for each in powers]

    wanted = 0.0
    for a, b in zip(*pairs):
        wanted += sum(p * math.log(p / q) for p, q in zip(softmax(a), softmax(b)))
    assert found.item() == pytest.approx(temperature**2 * wanted / len(images), rel=1e-9) and found > 0


@pytest.mark.parametrize("start", ["zero", "random"])
def test_the_attack_raises_it_though_it_is_stationary_at_first(tmp_path: Path, start: Any) -> None:
    step, settings = make_step(weights_file(tmp_path), DistilLogitsSettings(start=start))
    (calm,) = distil_logits(step, replace(settings, eps=0.0, steps=0))
    values = [next(distil_logits(step, replace(settings, eps=eps, alpha=eps / 4, steps=8))) for eps in (0.02, 0.1, 0.2)]
    assert abs(calm) < 1e-12 and 1e-6 < values[0] < values[1] < values[2]
    values[2].backward()
    assert isinstance(step.companion, Teacher) and isinstance(step.companion.linear, nn.Linear)
    assert step.companion.linear.weight.grad is not None and step.companion.linear.weight.grad.any()
    assert not any(p.requires_grad for p in step.companion.first.parameters())
    assert not any(p.requires_grad for p in step.companion.embedder.parameters())


def test_labels_have_no_part_in_it(tmp_path: Path) -> None:
    step, settings = make_step(weights_file(tmp_path), DistilLogitsSettings(), moved=0.3)
    (loss,) = distil_logits(step, settings)
    step.batch = Batch(step.batch.images, step.batch.labels.flip(0) + 5, step.batch.ids)
    assert next(distil_logits(step, settings)) == loss


def test_agreement_is_of_held_out_images(tmp_path: Path) -> None:
    images = some_images(60)
    settings = DistilLogitsSettings(eps=0.1, holdout=0.5, logits=COUNT)
    model = embedder(weights_file(tmp_path))
    companion = teacher(model, images.labels, settings)
    first = agreements(model, companion, images, settings, KEY, nullcontext)
    assert first["kl"] == pytest.approx(0, abs=1e-9) and first["agreement"] == 100 and first["kl_attacked"] > 1e-3
    for p in model.backbone[0].parameters():  # type: ignore[index]
        p.data.mul_(-1.0)
    found = agreements(model, companion, images, settings, KEY, nullcontext)
    held = images.store.images[companion.held].permute(0, 3, 1, 2)  # type: ignore[attr-defined]
    with torch.no_grad():
        before, after = companion(held), companion.linear(model.features(held))
        same = before.argmax(1) == after.argmax(1)
        kl = nn.functional.kl_div(after.log_softmax(1), before.softmax(1), reduction="batchmean")
    assert found["agreement"] == pytest.approx(100 * same.double().mean().item())
    assert found["kl"] == pytest.approx(kl.item(), rel=1e-4) and found["kl_attacked"] > found["kl"]
    assert found["agreement_attacked"] <= found["agreement"]


# Runs --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> ah.Dataset:
    whole = ah.dataset("digits")
    few = (torch.arange(len(part)) < 200 for part in (whole.train, whole.test))
    return replace(whole, train=whole.train.keep(next(few)), test=whole.test.keep(next(few)))


def fitted(digits: ah.Dataset, source: Path, out: Path, epochs: int = 8, **more: Any) -> Run:
    train = {"epochs": epochs, "evaluate_every": 2, "checkpoint_seconds": 0, **more}
    overrides = {"model": {"weights": str(source), "dim": 4}, "train": train}
    return ah.fit(None, digits, "distil-logits", out, overrides=overrides, device="cpu")


def tensors(run: Run) -> dict[str, Tensor]:
    loaded = run.load()
    assert loaded is not None
    return loaded[0]


@pytest.mark.slow
def test_the_divergence_falls_and_the_next_stage_finds_the_classifier(tmp_path: Path) -> None:
    digits = ah.dataset("digits")
    natural = {"train": {"epochs": 8, "benign": 1.0}, "model": {"dim": 4}}
    ah.fit(None, digits, "classify", tmp_path / "natural", overrides=natural, device="cpu")
    run = fitted(digits, tmp_path / "natural", tmp_path / "run", ema=0.9)
    info, rows = run.read_json(), [row for row in run.metrics() if "kl" in row]
    assert info["settings"]["defence"]["logits"] == 5 and rows[0]["epoch"] == 2
    assert tensors(run)["companion.first.weight"].equal(tensors(Run(tmp_path / "natural"))["companion.linear.weight"])
    settings, labels = DistilLogitsSettings(eps=0.1, alpha=0.05, logits=5), digits.train.labels
    assert digits.train.images is not None
    images = Images(digits.train, resident(digits.train.images, "cpu"), labels, None, False)
    model = ah.Embedder("small", 4, tmp_path / "natural", channels=1, size=8)
    first = agreements(model, teacher(model, labels, settings), images, settings, Key.of(0)("look"), nullcontext)
    assert first["kl"] == pytest.approx(0, abs=1e-9) and first["kl_attacked"] > 0.01
    assert rows[-1]["kl_attacked"] < 0.7 * first["kl_attacked"]
    assert rows[-1]["agreement_attacked"] > first["agreement_attacked"]
    again = ah.Embedder("small", 4, tmp_path / "run", channels=1, size=8)  # with the running mean
    found = classifier_of(again)
    assert found is not None and found.weight.equal(tensors(run)["ema.companion.linear.weight"])
    assert not found.weight.equal(tensors(run)["companion.first.weight"])


@pytest.mark.medium
def test_a_killed_run_resumes_bit_for_bit_without_its_weights_file(
    digits: ah.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = weights_file(tmp_path)
    alone = fitted(digits, source, tmp_path / "alone", 2)

    class Killed(BaseException): ...

    known, calls = PRETRAININGS["distil-logits"], iter(range(99))

    def dying(step: Step, settings: Any) -> Any:
        yield from known.run(step, settings)
        if next(calls) == 4:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setitem(PRETRAININGS, "distil-logits", Pretraining(dying, known.companion, known.measure))
        fitted(digits, source, tmp_path / "killed", 2)
    source.unlink()
    killed = ah.resume(tmp_path / "killed", data=digits, device="cpu")
    one, two = tensors(alone), tensors(killed)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert one["companion.linear.weight"].shape == (COUNT, 128)
    assert not torch.equal(one["companion.linear.weight"], one["companion.first.weight"])
    strip = [[{k: v for k, v in row.items() if k != "seconds"} for row in run.metrics()] for run in (alone, killed)]
    assert strip[0] == strip[1] and strip[0][-1]["step"] == 8


def test_settings_are_checked() -> None:
    for changes, told in (
        ({"temperature": 0.0}, "temperature"),
        ({"logits": -1}, "logits"),
        ({"holdout": 0}, "holdout"),
    ):
        with pytest.raises(SettingsError, match=told):
            DistilLogitsSettings(**changes)  # type: ignore[arg-type]
