"""Images without labels: folders beside a data set, and a folder without class folders."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import anchorhold as ah
from anchorhold.cli import main as cli
from anchorhold.config.recipes import settings_from
from anchorhold.data.beside import UNLABELLED, with_folders, without_folders
from anchorhold.errors import DataError, RunError, SettingsError
from anchorhold.pretraining.menu import PRETRAININGS
from anchorhold.random import Key

pytestmark = pytest.mark.medium

QUICK: dict[str, Any] = {
    "model": {"backbone": "test_resnet", "dim": 8, "weights": ""},
    "train": {"epochs": 1},
    "defence": {"steps": 1, "holdout": 0.01},
    "data": {"resize": 12, "crop": 12, "flip": False},
}


def picture(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = Key.of(3)("picture").uniform(torch.tensor([number]), (12, 12, 3))[0].mul(256).to(torch.uint8)
    Image.fromarray(pixels.numpy()).save(path)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """birds/ with 6 classes of 5 (2 of them held out), cars/ with loose and nested images, snaps/ with 9 loose ones."""
    for number in range(30):
        picture(tmp_path / "birds" / f"kind{number % 6}" / f"{number}.png", number)
    for number in range(7):
        picture(tmp_path / "cars" / ("a" if number % 2 else ".") / f"{number}.png", 100 + number)
    for number in range(9):
        picture(tmp_path / "snaps" / f"{number}.png", 200 + number)
    return tmp_path


def test_folders_beside_join_the_training_images_alone(place: Path) -> None:
    data = ah.dataset(str(place / "birds"))
    wide = with_folders(data, f"{place / 'cars'}, {place / 'snaps'}")
    assert (len(wide.train), len(data.train)) == (20 + 7 + 9, 20)
    assert wide.test is data.test and wide.train.classes[-1] == UNLABELLED
    assert wide.train.labels[20:].unique().tolist() == [len(data.train.classes)]
    assert wide.train.sample(20) == "beside/0.png" and wide.train.sample(0).startswith("kind")
    assert sorted(path.parent.name for path in (wide.train.paths or ())[20:27]) == ["a"] * 3 + ["cars"] * 4
    assert without_folders(wide).train.fingerprint() == data.train.fingerprint() != wide.train.fingerprint()
    assert without_folders(data) is data and with_folders(data, "") is data
    again = with_folders(data, f"{place / 'cars'},{place / 'cars'},{place / 'birds'}")  # no image twice
    assert len(again.train) == 20 + 7 + 10  # those of the held-out birds
    # Wherever the folders lie, they are the same images.
    moved = shutil.copytree(place, place / "elsewhere")
    other = with_folders(ah.dataset(str(moved / "birds")), f"{moved / 'cars'},{moved / 'snaps'}")
    assert other.train.fingerprint() == wide.train.fingerprint()
    with pytest.raises(DataError, match="has no images"):
        (place / "empty").mkdir()
        with_folders(data, str(place / "empty"))
    with pytest.raises(SettingsError, match="are in memory"):
        with_folders(ah.dataset("digits"), str(place / "cars"))


@pytest.mark.parametrize("recipe", ["distil", "distil-logits"])
def test_a_pretraining_sees_the_images_beside_and_resumes_with_them(
    place: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    changes = {**QUICK, "data": {**QUICK["data"], "beside": str(place / "cars")}}
    entry, seen = PRETRAININGS[recipe], list[torch.Tensor]()

    def noting(step: Any, settings: Any) -> Any:
        seen.extend(step.batch.images.flatten(1))
        yield from entry.run(step, settings)

    monkeypatch.setitem(PRETRAININGS, recipe, entry.__class__(noting, entry.companion, entry.measure))
    run = ah.fit(None, str(place / "birds"), recipe, place / "run", overrides=changes, device="cpu")
    for number, there in ((100, True), (106, True), (200, False)):
        wanted = Key.of(3)("picture").uniform(torch.tensor([number]), (12, 12, 3))[0].mul(256).to(torch.uint8)
        flat = (wanted.permute(2, 0, 1).float() / 255).flatten()
        assert any(torch.allclose(each, flat, atol=1e-6) for each in seen) == there
    info = run.read_json()
    assert info["data"]["images"] == [27, 10] and "features_r1" in info["final"]
    # The model's record is of the birds, so that an audit of them leaves out the right classes.
    model = ah.load(run.path)
    assert model.trained_on is not None
    assert model.trained_on.train == ah.dataset(str(place / "birds")).train.fingerprint()
    run.update_json(status="interrupted")
    assert ah.resume(run.path, device="cpu").read_json()["status"] == "done"
    run.update_json(status="interrupted")
    (place / "cars" / "0.png").unlink()
    with pytest.raises(RunError, match="changed since the run began"):
        ah.resume(run.path, device="cpu")


def test_what_uses_labels_refuses_them(place: Path) -> None:
    changes = {**QUICK, "defence": {}, "data": {**QUICK["data"], "beside": str(place / "cars")}}
    with pytest.raises(SettingsError, match=r"data\.beside has images without labels, .*: natural uses labels"):
        ah.fit(None, str(place / "birds"), "natural", place / "run", overrides=changes, device="cpu")
    for recipe in ("natural", "classify"):
        with pytest.raises(DataError, match="but no class folders"):
            ah.fit(None, str(place / "snaps"), recipe, place / "run", overrides=QUICK, device="cpu")
    loose = ah.dataset(str(place / "snaps"), labels=False)
    with pytest.raises(SettingsError, match="has no class folders, for distil and distil-logits: natural uses labels"):
        ah.fit(None, loose, "natural", place / "run", overrides={**QUICK, "defence": {}}, device="cpu")
    (place / "few").mkdir()
    picture(place / "few" / "1.png", 1)
    with pytest.raises(DataError, match="has 1 images; give at least 4"):
        ah.dataset(str(place / "few"), labels=False)


def test_settings_made_before_train_on_loose_photos_too(place: Path) -> None:
    sections = {**QUICK, "data": {**QUICK["data"], "name": "folder", "root": str(place / "snaps")}}
    settings = settings_from("distil-logits", sections)
    run = ah.fit(None, str(place / "snaps"), settings=settings, out=place / "run", device="cpu")
    assert run.read_json()["data"]["images"][0] == 9
    with pytest.raises(DataError, match="but no class folders"):
        ah.fit(None, str(place / "snaps"), settings=settings_from("natural"), out=place / "no", device="cpu")


def test_any_folder_of_photos_from_the_command_line(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["anchorhold", *words, "--device", "cpu"])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert not stop.value.code
        return capsys.readouterr().out

    monkeypatch.chdir(place)
    sets = [f"{a}.{b}={c}" for a, section in QUICK.items() for b, c in section.items()]
    told = [word for each in sets for word in ("--set", each)]
    out = command("train", "snaps", "--recipe", "distil-logits", "--out", "start", *told)
    assert "agreement" in out and "R@1" not in out and "next: anchorhold train DATA --weights start" in out
    info = json.loads(Path("start/run.json").read_text())
    assert info["data"]["images"][0] == 9 and "features_r1" not in info["final"]
    text = Path("start/run.json").read_text().replace('"status": "done"', '"status": "interrupted"')
    Path("start/run.json").write_text(text)
    assert "agreement" in command("resume", "start")
