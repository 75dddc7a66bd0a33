"""A model keeps how its images are made and which data it has seen: whatever uses it gets the numbers of training."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from PIL import Image

import anchorhold as ah
from anchorhold.auditing.classes import part_of
from anchorhold.auditing.inputs import prepare
from anchorhold.console import Silent
from anchorhold.data.datasets import dataset
from anchorhold.errors import SettingsError
from anchorhold.index.searching import search
from anchorhold.metrics import evaluate
from anchorhold.model.embedder import Embedder
from anchorhold.model.preprocessing import Preprocessing
from anchorhold.model.weights import METADATA
from anchorhold.model.wrap import as_victim
from anchorhold.report.collect import collect
from anchorhold.runs.folder import EXPORT, Run
from tests.cli.test_main import run as command

pytestmark = pytest.mark.medium

CPU = torch.device("cpu")
QUICK: dict[str, Any] = {"steps": 1, "attacks": ["ES"], "limit": 4, "device": "cpu", "examine": None}
SMALL: dict[str, Any] = {
    "model": {"backbone": "small", "dim": 16, "weights": ""},
    "batch": {"pairs": 16, "mining_pairs": 0},
    "optimiser": {"lr": 1e-3},
    "train": {"epochs": 1, "evaluate_every": 1},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten classes of noisy stripes with bright borders, so that a crop makes a difference; and a run on them."""
    root = tmp_path_factory.mktemp("preprocessing")
    draw = np.random.default_rng(0)
    for number in range(10):
        folder = root / "photos" / f"class{number}"
        folder.mkdir(parents=True)
        for index in range(10):
            pixels = draw.integers(0, 120, (48, 64, 3))
            pixels[:, :: number + 2, number % 3] += 90
            pixels[:6], pixels[:, -8:] = draw.integers(0, 255, 3), draw.integers(0, 255, 3)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{index}.png")
    ah.fit(
        None,
        root / "photos",
        "natural",
        root / "runs" / "mine",
        overrides=SMALL | {"data": {"resize": 40, "crop": 32}},
        device="cpu",
    )
    return root


def final(run: Path) -> float:
    return float(json.loads((run / "run.json").read_text())["final"]["r1"])


def audited(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "audit.json").read_text())
    return found


def test_training_audit_and_vectors_give_the_same_r1(
    place: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, photos = place / "runs" / "mine", place / "photos"
    options = ["--steps", "1", "--attacks", "ES", "--device", "cpu", "--out", str(tmp_path / "a")]
    code, _, err = command(capsys, monkeypatch, "audit", str(run), "--data", str(photos), *options)
    assert code == 0, err
    found = audited(tmp_path / "a")
    assert [found["data"]["query"][side] for side in ("resize", "crop")] == [40, 32]
    assert found["clean"]["R@1"]["value"] == pytest.approx(final(run), abs=1e-4)

    code, _, err = command(capsys, monkeypatch, "embed", str(run), str(photos), "--out", str(tmp_path / "ix"))
    assert code == 0, err
    index = ah.embed(run, photos, tmp_path / "ix", device="cpu")  # complete already, with the same preprocessing
    test = dataset("folder", photos).test
    rows = {name: row for row, (name, _) in enumerate(index.rows)}
    vectors = torch.cat(list(index.parts()))[[rows[test.sample(i)] for i in range(len(test))]]
    assert 100 * evaluate(vectors, test.labels).r1 == pytest.approx(final(run), abs=1e-4)


def test_the_record_is_in_the_file_in_the_run_and_given_to_users(place: Path) -> None:
    run, record = place / "runs" / "mine", {"resize": 40, "crop": 32, "interpolation": "bilinear"}
    assert json.loads((run / "run.json").read_text())["model"]["config"]["preprocessing"] == record
    with safetensors.safe_open(run / EXPORT, "pt") as file:
        assert json.loads(file.metadata()[METADATA])["config"]["preprocessing"] == record
    model = ah.load(run)
    way = model.preprocess
    assert way.described() == record | {"mean": tuple(model.config["mean"]), "std": tuple(model.config["std"])}
    assert not way.assumed and way.side == 32
    part = part_of(place / "photos", (model,))
    material = prepare(part.data, model, CPU, Silent())
    for number in (0, 7, 19):
        (decoded,) = material.query.plain(torch.tensor([number]))
        assert material.query.split.paths is not None
        path = material.query.split.paths[number]
        assert torch.equal(way(path), decoded[0]) and torch.equal(way(str(path)), decoded[0])
        with Image.open(path) as opened:
            assert torch.equal(way(opened), decoded[0])


def test_search_goes_the_way_of_the_index(place: Path, tmp_path: Path) -> None:
    run, photos = place / "runs" / "mine", place / "photos"
    for name, options in (("own", {}), ("whole", {"resize": 32, "crop": 0})):
        index = ah.embed(run, photos, tmp_path / name, device="cpu", **options)  # type: ignore[arg-type]
        sides = [options.get("resize", 40), options.get("crop", 32)]
        assert [index.about["preprocessing"][side] for side in ("resize", "crop")] == sides
        assert index.about["preprocessing"]["interpolation"] == "bilinear"
        found = ah.search(index, photos / "class3" / "4.png", 1, device="cpu")
        assert found.hits[0].id == "class3/4.png" and found.hits[0].distance < 1e-4


@pytest.mark.slow
def test_the_onnx_file_says_resize_crop_and_interpolation(
    place: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    out = tmp_path / "m.onnx"
    code, said, err = command(capsys, monkeypatch, "export", str(place / "runs" / "mine"), "--out", str(out))
    assert code == 0, err
    model = onnx.load(out)
    about = {entry.key: entry.value for entry in model.metadata_props}
    for text in (about["preparation"], model.doc_string, said):
        assert "40×40 (bilinear)" in text and "32×32" in text
    assert json.loads(about["preprocessing"])["resize"] == 40
    sides = [each.dim_value for each in model.graph.input[0].type.tensor_type.shape.dim][2:]
    assert sides == [32, 32]


def test_a_model_without_a_record_is_taken_as_before(place: Path, tmp_path: Path) -> None:
    model = ah.load(place / "runs" / "mine")
    del model.config["preprocessing"]
    model.trained_on = None
    model.save(tmp_path / "old.safetensors")
    old = ah.load(tmp_path / "old.safetensors")
    assert old.preprocess.assumed and (old.preprocess.resize, old.preprocess.crop) == (37, 32)
    assert "preprocessing" not in old.config
    material = prepare(str(place / "photos"), old, CPU, Silent())
    assert (material.query.resize, material.query.crop) == (37, 32)
    assert any("37×37" in note for note in material.notes)
    for options, sides in (({"crop": 28}, (32, 28)), ({"resize": 48}, (48, 32)), ({"crop": 0}, (32, None))):
        material = prepare(str(place / "photos"), old, CPU, Silent(), **options)  # type: ignore[arg-type]
        assert (material.query.resize, material.query.crop) == sides


def test_what_a_user_says_replaces_only_that(place: Path) -> None:
    model = ah.load(place / "runs" / "mine")
    assert [(way.resize, way.crop) for way in (model.preprocess.told(crop=24), model.preprocess.told(44))] == [
        (40, 24),
        (44, 32),
    ]
    with pytest.raises(SettingsError, match="a crop of 32 does not fit images of 20×20"):
        model.preprocess.told(resize=20)
    half = as_victim(ah.load(place / "runs" / "mine").half())
    assert half.preprocess == model.preprocess  # wrapped for its precision, and still the same model
    assert ah.wrap(torch.nn.Flatten(), size=(28, 28)).preprocess == Preprocessing(32, 28, assumed=True)
    again = Embedder("small", 0, place / "runs" / "mine")
    assert again.size == (32, 32) and again.preprocess.resize == 40
    assert Embedder("small", 0, place / "runs" / "mine", size=28).preprocess.assumed


def test_a_model_that_is_not_square_gets_photos_without_distortion(place: Path, tmp_path: Path) -> None:
    """They are resized to cover its size, and the centre is kept; a photo of that size is used as it is."""
    model = ah.wrap(torch.nn.Flatten(), size=(20, 16))
    pixels = np.random.default_rng(1).integers(0, 255, (20, 16, 3), dtype=np.uint8)
    own = Image.fromarray(pixels)
    assert torch.equal(model.preprocess(own), torch.from_numpy(pixels).permute(2, 0, 1).float() / 255)
    wide = Image.fromarray(pixels).resize((40, 20))  # too wide: 12 columns on each side are cut off
    assert torch.equal(model.preprocess(wide), model.preprocess(wide.crop((12, 0, 28, 20))))
    twice = own.resize((32, 40))
    assert torch.equal(model.preprocess(twice), model.preprocess(twice.resize((16, 20), Image.Resampling.BILINEAR)))
    said: list[str] = []
    report = Silent()
    report.say = said.append  # type: ignore[method-assign]
    material = prepare(str(place / "photos"), model, CPU, report)
    (images,) = material.query.plain(torch.arange(3))
    files = material.query.split.paths
    assert images.shape == (3, 3, 20, 16) and files is not None
    assert torch.equal(images, torch.stack([model.preprocess(path) for path in files[:3]]))
    assert material.describe()["query"]["shape"] == [20, 16]
    assert any("resize to cover 20×16 (bilinear), centre crop 20×16" in note for note in material.notes)
    pictures = prepare([(Image.open(path), at % 2) for at, path in enumerate(files[:4])], model, CPU, report)
    (shown,) = pictures.query.plain(torch.arange(3))
    assert torch.equal(shown, images)
    ah.audit(model, place / "photos", **QUICK)
    assert not any("are resized" in note for note in model.notes)
    own.save(tmp_path / "other.png")
    ah.attack(model, tmp_path / "other.png", place / "photos", goal="ES", steps=1, device="cpu")  # a file apart
    told = model.preprocess.told(crop=14)  # the user's squares replace the shape
    assert (told.resize, told.crop, told.shape) == (16, 14, None)


def test_an_index_of_a_model_that_is_not_square_finds_its_own_photos(place: Path, tmp_path: Path) -> None:
    model = ah.wrap(torch.nn.Flatten(), size=(20, 16))
    index = ah.embed(model, place / "photos", tmp_path / "index", device="cpu")
    photo = place / "photos" / "class3" / "4.png"
    (hit,) = search(index, photo, k=1, model=model, device="cpu").hits
    assert hit.id == "class3/4.png" and hit.distance == pytest.approx(0, abs=1e-6)
    again = ah.embed(model, place / "photos", tmp_path / "index", device="cpu")
    assert len(again) == 100


def test_images_in_memory_go_the_way_of_training_and_tensors_as_they_are(tmp_path: Path) -> None:
    data = dataset("digits")
    overrides = SMALL | {"data": {"resize": 12, "crop": 10}}
    run = ah.fit(None, data, "natural", tmp_path / "run", overrides=overrides, device="cpu").path
    model = ah.load(run)
    found = ah.audit(model, data, **QUICK)
    assert found.clean["R@1"].value == pytest.approx(final(run), abs=1e-4)
    assert found.data["query"]["resize"] == 12 and found.data["query"]["crop"] == 10
    assert data.test.images is not None
    pixels = data.test.images.permute(0, 3, 1, 2).float() / 255
    material = prepare((pixels, data.test.labels), model, CPU, Silent())
    assert torch.equal(torch.cat(list(material.query.plain())), pixels)


def test_a_given_model_takes_the_settings_of_its_run(place: Path, tmp_path: Path) -> None:
    model = Embedder("small", 16, size=28)
    overrides = SMALL | {"data": {"resize": 36, "crop": 0}}
    del overrides["model"]
    ah.fit(model, place / "photos", "natural", tmp_path / "run", overrides=overrides, device="cpu")
    for each in (model, ah.load(tmp_path / "run")):
        assert (each.preprocess.resize, each.preprocess.crop, each.preprocess.side) == (36, 0, 36)
        found = ah.audit(each, place / "photos", **QUICK)
        assert found.clean["R@1"].value == pytest.approx(final(tmp_path / "run"), abs=1e-4)


def test_the_library_and_the_command_attack_the_same_classes(
    place: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, photos = place / "runs" / "mine", place / "photos"
    unseen = dataset("folder", photos).test
    shutil.copy(run / EXPORT, tmp_path / "alone.safetensors")  # the record is in the file, and needs no folder
    for number, model in enumerate((run, tmp_path / "alone.safetensors")):
        loaded = ah.load(model)
        mine = ah.audit(loaded, str(photos), **QUICK)
        out = tmp_path / f"a{number}"
        options = ["--steps", "1", "--attacks", "ES", "--limit", "4", "--device", "cpu", "--out", str(out)]
        code, said, err = command(capsys, monkeypatch, "audit", str(model), "--data", str(photos), *options)
        assert code == 0, err
        theirs = audited(out)
        assert mine.data["query"] == theirs["data"]["query"] and mine.data["images"] == [20, 20]
        assert mine.data["query"]["fingerprint"] == unseen.fingerprint()
        assert mine.data["part"] == theirs["data"]["part"] and "not trained on" in mine.data["part"]
        for text in (str(mine), said, err):
            assert mine.data["part"] in text
        everything = ah.audit(loaded, photos, classes="all", **QUICK)
        code, said, err = command(
            capsys,
            monkeypatch,
            "audit",
            str(model),
            "--data",
            str(photos),
            *options[:-1],
            f"{out}-all",
            "--classes=all",
        )
        assert code == 0, err
        theirs = audited(Path(f"{out}-all"))
        assert everything.data["images"] == theirs["data"]["images"] == [100, 100]
        assert everything.data["query"] == theirs["data"]["query"] and theirs["settings"]["classes"] == "all"
        assert "including those that the model was trained on" in said and theirs["data"]["part"] in str(everything)
    with pytest.raises(SettingsError, match="classes cannot be 'some'"):
        ah.audit(ah.load(run), photos, classes="some", **QUICK)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="without splits"):
        ah.audit(ah.load(run), dataset("folder", photos), classes="all", **QUICK)


def test_a_model_that_has_seen_other_data_is_attacked_on_all(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "photos", tmp_path / "photos")
    for folder in (tmp_path / "photos").iterdir():
        shutil.copy(folder / "0.png", folder / "more.png")
    for model in (ah.load(place / "runs" / "mine"), Embedder("small", 16, size=32)):
        found = ah.audit(model, tmp_path / "photos", **QUICK)
        assert found.data["images"] == [110, 110] and found.data["part"].startswith("all classes of photos")
    (tmp_path / "photos" / "train").mkdir()
    for number in range(10):
        inner = tmp_path / "photos" / ("test" if number < 2 else "train")
        inner.mkdir(exist_ok=True)
        shutil.move(tmp_path / "photos" / f"class{number}", inner)
    found = ah.audit(ah.load(place / "runs" / "mine"), tmp_path / "photos", **QUICK)
    assert found.data["images"] == [22, 22] and found.data["part"] == "the test images of photos"


def test_compare_finds_the_audit_of_a_run_in_any_folder(place: Path, tmp_path: Path) -> None:
    run = place / "runs" / "mine"
    shutil.copytree(run, tmp_path / "runs" / "mine")
    other = json.loads((run / "run.json").read_text()) | {"weights": "another"}
    shutil.copytree(run, tmp_path / "runs" / "other")
    Run(tmp_path / "runs" / "other").write_json(other)
    ah.audit(ah.load(run), place / "photos", out=tmp_path / "elsewhere" / "x", **QUICK)
    found = collect([tmp_path / "runs", tmp_path / "elsewhere"]).entries
    joined = {entry.path.name: entry.audit_at and entry.audit_at.name for entry in found}
    assert joined == {"mine": "x", "other": None}
    assert {entry.path.name for entry in collect([tmp_path / "elsewhere"]).entries} == {"x"}
