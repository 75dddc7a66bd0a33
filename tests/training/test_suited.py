"""A small data set of yours gets a batch of its own, and nothing else does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import anchorhold as ah
from anchorhold.config.recipes import settings_from
from anchorhold.data.batches import class_batches, image_batches, pair_batches
from anchorhold.data.settings import BatchSettings
from anchorhold.data.splits import Split
from anchorhold.errors import Interrupted
from anchorhold.random import Key
from anchorhold.runs.folder import Run
from anchorhold.training import loop
from anchorhold.training.suited import STEPS, smaller_batch, steps_of, suited
from anchorhold.training.sweeping import sweep

SMALL = {
    "data.resize": 12,
    "data.crop": 10,
    "model.backbone": "small",
    "model.dim": 8,
    "model.weights": "",
    "train.epochs": 2,
    "train.evaluate_every": 9,
    "train.on_collapse": "warn",
}


class Lines:
    """A report that remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def task(self, name: str, total: int, done: int = 0) -> Any:
        from contextlib import nullcontext

        return nullcontext(lambda done, note: None)


def split(images: int, classes: int) -> Split:
    labels = torch.arange(images) % classes
    return Split("made", labels, tuple(map(str, range(classes))), images=torch.zeros(images, 2, 2, 1))


def photographs(root: Path, classes: int = 6, each: int = 20) -> Path:
    pixels = Key.of(1)("photographs").uniform(torch.arange(classes * each), (12, 12, 3)).mul(256).to(torch.uint8)
    for number, image in enumerate(pixels):
        path = root / f"class{number % classes}" / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.numpy()).save(path)
    return root


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 training images of 4 classes; 2 classes are held out."""
    return photographs(tmp_path_factory.mktemp("suited") / "photos")


@pytest.mark.parametrize("images", [2, 7, 79, 80, 83, 300, 1119, 1120, 1121, 5864])
@pytest.mark.parametrize("pairs", [4, 56, 112])
def test_pairs_give_ten_steps_where_there_are_images_for_them(images: int, pairs: int) -> None:
    own = split(images, 2)
    batch = smaller_batch(BatchSettings(pairs=pairs), own)
    steps = len(pair_batches(own.labels, batch.pairs, Key.of(0)))
    assert steps == steps_of(batch, own)
    assert batch.pairs <= pairs and (batch.pairs >= 8 or pairs < 8)
    assert steps >= STEPS or batch.pairs == min(8, pairs)
    if len(pair_batches(own.labels, pairs, Key.of(0))) >= STEPS:
        assert batch.pairs == pairs


@pytest.mark.parametrize("images", [2, 7, 81, 113, 300, 1119, 1121, 5864])
def test_single_images_give_ten_steps_where_there_are_images_for_them(images: int) -> None:
    own, given = split(images, 2), BatchSettings(kind="images")
    batch = smaller_batch(given, own)
    steps = len(image_batches(own.labels, batch.images, Key.of(0)))
    assert steps == steps_of(batch, own) and steps_of(given, own) == len(image_batches(own.labels, 112, Key.of(0)))
    assert (steps >= STEPS and batch.images <= 112) or batch.images == 16
    assert batch == given or images < 1121


@pytest.mark.parametrize(("images", "classes"), [(40, 4), (300, 12), (300, 100), (2000, 20), (6000, 100)])
def test_classes_are_never_more_than_there_are(images: int, classes: int) -> None:
    own, given = split(images, classes), BatchSettings(kind="classes", classes=56, instances=2)
    batch = smaller_batch(given, own)
    steps = len(class_batches(own.labels, batch.classes, batch.instances, Key.of(0)))
    assert steps == steps_of(batch, own) and batch.classes <= min(56, classes)
    assert steps >= STEPS or batch.classes == min(8, classes)
    if images == 6000:
        assert batch == given


@pytest.mark.parametrize("name", ["cub", "cars", "sop", "inshop", "digits", "gaussians"])
def test_named_data_sets_keep_the_batch_of_their_recipe(name: str) -> None:
    settings = settings_from("hm-lga", {"data.name": name})
    assert suited(settings, name, split(90, 5)) == (settings, "")


def test_what_was_set_stays_set() -> None:
    settings = settings_from("hm-lga", {"data.name": "folder"})
    chosen, note = suited(settings, "folder", split(300, 5))
    assert chosen.batch.pairs == 28 and "batch.pairs = 28 instead of 112" in note and "\n" not in note
    assert suited(settings, "folder", split(300, 5), {"batch.pairs"}) == (settings, "")
    assert suited(settings, "folder", split(300, 5), {"train.epochs"})[0].batch.pairs == 28
    adml = settings_from("adml", {"data.name": "folder"})
    assert suited(adml, "folder", split(300, 5), {"batch.instances"}) == (adml, "")
    assert suited(adml, "folder", split(300, 5))[0].batch.classes == 5


@pytest.mark.medium
def test_fit_chooses_records_and_resumes_with_it(photos: Path, tmp_path: Path, monkeypatch: Any) -> None:
    report = Lines()
    whole = ah.fit(None, str(photos), "natural", tmp_path / "whole", overrides=SMALL, device="cpu", report=report)
    assert whole.read_json()["settings"]["batch"]["pairs"] == 8
    assert [row["step"] for row in whole.metrics()] == [10, 20]
    assert sum("batch.pairs = 8 instead of 112" in line for line in report.said) == 1

    def killed(trainer: Any, batch: Any, step: Any = loop.train_step) -> None:
        if trainer.at.step == 12:
            trainer.save()
            raise Interrupted("here")
        step(trainer, batch)

    with monkeypatch.context() as stopping:
        stopping.setattr(loop, "train_step", killed)
        with pytest.raises(Interrupted, match="here"):
            ah.fit(None, str(photos), "natural", tmp_path / "killed", overrides=SMALL, device="cpu")
    again = ah.resume(tmp_path / "killed", device="cpu")
    assert again.read_json()["settings"] == whole.read_json()["settings"]
    assert again.read_json()["weights"] == whole.read_json()["weights"]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("given", "pairs"),
    [({"overrides": SMALL | {"batch.pairs": 40}}, 40), ({"overrides": SMALL, "row": "hm/t6/cub/n-a-r"}, 112)],
)
def test_fit_keeps_a_batch_that_was_set_or_published(
    photos: Path, tmp_path: Path, given: dict[str, Any], pairs: int
) -> None:
    run = ah.fit(None, str(photos), "natural", tmp_path / "run", device="cpu", **given)
    assert run.read_json()["settings"]["batch"]["pairs"] == pairs


@pytest.mark.medium
def test_a_recipe_of_yours_and_whole_settings_are_explicit(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('extends = "natural"\n[batch]\npairs = 30\n')
    data = ah.dataset(str(photos))
    run = ah.fit(None, data, str(tmp_path / "mine.toml"), tmp_path / "run", overrides=SMALL, device="cpu")
    assert run.read_json()["settings"]["batch"]["pairs"] == 30
    settings = settings_from("natural", {**SMALL, "data.name": "folder", "data.root": str(photos)})
    run = ah.fit(None, data, settings=settings, out=tmp_path / "two", device="cpu")
    assert run.read_json()["settings"]["batch"]["pairs"] == 112


@pytest.mark.medium
def test_images_in_memory_too(tmp_path: Path) -> None:
    images = Key.of(2)("images").uniform(torch.arange(60), (3, 8, 8)).float()
    changes = {name: value for name, value in SMALL.items() if not name.startswith("data.")}
    data = images, torch.arange(60) % 5
    run = ah.fit(None, data, "natural", tmp_path / "run", overrides=changes, device="cpu")
    assert run.read_json()["settings"]["batch"]["pairs"] == 8


@pytest.mark.medium
def test_a_sweep_trains_as_fit_does(photos: Path, tmp_path: Path) -> None:
    data = ah.dataset(str(photos))
    changes = {**SMALL, "train.epochs": 1}
    for _ in range(2):  # the second finds the runs of the first
        sweep(data, "natural", {"train.seed": ["0", "1"]}, tmp_path / "s", overrides=changes, device="cpu")
    assert Run(tmp_path / "s" / "train.seed=1").read_json()["settings"]["batch"]["pairs"] == 8
    sweep(data, "natural", {"batch.pairs": ["30"]}, tmp_path / "t", overrides=changes, device="cpu")
    info = json.loads((tmp_path / "t" / "batch.pairs=30" / "run.json").read_text())
    assert info["settings"]["batch"]["pairs"] == 30
