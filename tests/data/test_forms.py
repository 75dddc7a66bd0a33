"""`fit` and `audit` take the same forms of the same data, and leave out the same classes."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

import anchorhold as ah
from anchorhold.data.adapters import dataset_from, split_from
from anchorhold.errors import RunError
from tests.hub import HubSplit, Value, hub_split
from tests.hub import Image as HubImage

WHOLE = ah.dataset("digits")
PIXELS = torch.cat([split.images[:150] for split in (WHOLE.train, WHOLE.test)]).permute(0, 3, 1, 2)  # type: ignore[index]
LABELS = torch.cat([split.labels[:150] for split in (WHOLE.train, WHOLE.test)])
WORDS = ("nought", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
NAMES = [WORDS[label] for label in LABELS.tolist()]
SHORT: dict[str, Any] = {
    "train": {"epochs": 1, "collapse_warmup": 9},
    "model": {"backbone": "small", "dim": 8, "weights": ""},
    "batch": {"pairs": 16},
    "data": {"flip": False},
}
AUDIT: dict[str, Any] = {"limit": 6, "steps": 1, "attacks": ["ES"], "resamples": 5, "examine": None, "device": "cpu"}


class Named(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return len(PIXELS)

    def __getitem__(self, place: int) -> tuple[torch.Tensor, str]:
        return PIXELS[place], NAMES[place]


def folder(place: Path) -> Path:
    for number, (image, name) in enumerate(zip(PIXELS, NAMES)):
        (place / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].numpy()).save(place / name / f"{number:03d}.png")
    return place


def table(place: Path) -> Path:
    folder(place / "images")
    rows = [f"images/{name}/{number:03d}.png,{name}" for number, name in enumerate(NAMES)]
    (place / "photos.csv").write_text("\n".join(["path,label", *rows]) + "\n")
    return place / "photos.csv"


FORMS: dict[str, Any] = {
    "tensors": lambda place: (PIXELS, LABELS),
    "floats": lambda place: (PIXELS.float() / 255, LABELS),
    "arrays": lambda place: (PIXELS.numpy(), LABELS.numpy()),
    "names": lambda place: (PIXELS, NAMES),
    "dataset": lambda place: TensorDataset(PIXELS, LABELS),
    "named dataset": lambda place: Named(),
    "loader": lambda place: DataLoader(Named(), batch_size=32, shuffle=True),
    "hub": lambda place: hub_split(PIXELS, LABELS.tolist(), WORDS),
    "hub torch": lambda place: hub_split(PIXELS, LABELS.tolist(), WORDS).with_format("torch"),
    "folder": lambda place: folder(place / "photos"),
    "csv": table,
    "name": lambda place: "digits",
}
IN_MEMORY = [name for name in FORMS if name not in ("folder", "csv", "name")]


@pytest.mark.medium
@pytest.mark.parametrize("form", FORMS)
def test_what_fit_takes_audit_takes_and_leaves_the_training_classes_out(form: str, tmp_path: Path) -> None:
    data = FORMS[form](tmp_path)
    # Files and pictures are resized by the recipe unless it is told otherwise.
    sizes = {"data": {"flip": False, "resize": 8, "crop": 8}}
    overrides = SHORT | (sizes if form in ("hub", "folder", "csv") else {})
    run = ah.fit(None, data, "natural", tmp_path / "run", overrides=overrides, device="cpu")
    assert run.read_json()["status"] == "done"
    model = ah.load(run.path)
    found = ah.audit(model, data, **AUDIT)
    whole = ah.dataset("digits") if form == "name" else dataset_from(data)
    tested = len(torch.unique(whole.test.labels))
    assert found.data["classes"] == tested == (5 if form == "name" else 2) and not found.notes
    assert found.data["images"] == [len(whole.test)] * 2
    if form not in ("name",):
        every = ah.audit(model, data, classes="all", **AUDIT)
        assert every.data["classes"] == 10 and "including those that the model was trained on" in every.data["part"]


@pytest.mark.parametrize("form", IN_MEMORY)
def test_forms_in_memory_are_the_same_images(form: str, tmp_path: Path) -> None:
    split = split_from(FORMS[form](tmp_path))
    assert split.images is not None and split.images.shape == (300, 8, 8, 1)
    pixels = split.images if split.images.dtype == torch.uint8 else (split.images * 255).round().to(torch.uint8)
    assert torch.equal(pixels, PIXELS.permute(0, 2, 3, 1))
    told = [split.classes[label] for label in split.labels.tolist()]
    assert told == (NAMES if split.classes[0] in WORDS else [str(label) for label in LABELS.tolist()])


def test_a_hub_split_in_all_its_forms() -> None:
    plain = hub_split(PIXELS, LABELS.tolist(), WORDS)
    known = split_from(plain)
    assert known.classes == WORDS  # in the order of the numbers
    for other in (
        plain.with_format("torch"),
        plain.with_format("numpy"),
        plain.rename_column("label", "fine_label"),
        DataLoader(plain.with_format("torch"), batch_size=16),  # type: ignore[arg-type]
        DataLoader(plain.with_format("torch"), batch_size=16, sampler=range(300)),  # type: ignore[arg-type]
    ):
        found = split_from(other)
        assert torch.equal(found.images, known.images)  # type: ignore[arg-type]
        assert torch.equal(found.labels, known.labels)
    streamed = split_from(plain.to_iterable_dataset())
    assert torch.equal(streamed.images, known.images)  # type: ignore[arg-type]
    assert streamed.classes == tuple(str(number) for number in range(10))  # a stream may not know its names


def test_a_hub_split_of_names_and_of_images_that_are_not_decoded() -> None:
    def packed(image: torch.Tensor) -> dict[str, Any]:
        file = io.BytesIO()
        Image.fromarray(image[0].numpy()).save(file, format="PNG")
        return {"bytes": file.getvalue(), "path": None}

    columns: dict[str, list[Any]] = {"img": [packed(image) for image in PIXELS], "class": list(NAMES)}
    split = split_from(HubSplit(columns, {"img": HubImage(decode=False), "class": Value("string")}))
    assert [split.classes[label] for label in split.labels.tolist()] == NAMES
    assert torch.equal(split.images, PIXELS.permute(0, 2, 3, 1))  # type: ignore[arg-type]


@pytest.mark.medium
def test_names_reach_the_files_of_an_audit(tmp_path: Path) -> None:
    from safetensors import safe_open

    model = ah.Embedder("small", 8, channels=1, size=8)
    ah.audit(model, (PIXELS, NAMES), out=tmp_path, **AUDIT)
    with safe_open(tmp_path / "pictures.safetensors", "pt") as file:
        told = " ".join(file.metadata().values())
    assert any(word in told for word in WORDS)
    assert any(word in (tmp_path / "page.html").read_text() for word in WORDS)


@pytest.mark.medium
def test_a_mapping_of_parts_is_taken_by_both(tmp_path: Path) -> None:
    half = LABELS < 5
    data = {
        "train": hub_split(PIXELS[half], LABELS[half].tolist(), WORDS).with_format("torch"),
        "test": hub_split(PIXELS[~half], LABELS[~half].tolist(), WORDS).with_format("torch"),
    }
    run = ah.fit(None, data, "natural", tmp_path / "run", overrides=SHORT, device="cpu")
    for model in (ah.load(run.path), ah.Embedder("small", 8, channels=1, size=8)):  # with and without a record
        found = ah.audit(model, data, **AUDIT)
        assert found.data["classes"] == 5 and not found.notes


@pytest.mark.slow
def test_folders_that_are_given_as_parts_are_given_again_to_resume(tmp_path: Path) -> None:
    data = {part: folder(tmp_path / part) for part in ("train", "test")}
    overrides = SHORT | {"data": {"flip": False, "resize": 8, "crop": 8}}
    run = ah.fit(None, data, "natural", tmp_path / "run", overrides=overrides, device="cpu")
    record = run.path / "run.json"
    record.write_text(record.read_text().replace('"status": "done"', '"status": "training"'))
    with pytest.raises(RunError, match="give the same again"):
        ah.resume(run.path, device="cpu")
    assert ah.resume(run.path, data=data, device="cpu").read_json()["status"] == "done"
    assert ah.audit(ah.load(run.path), data, **AUDIT).data["classes"] == 10


@pytest.mark.medium
def test_pictures_of_one_size_are_resumed_as_they_were_begun(tmp_path: Path) -> None:
    data = hub_split(PIXELS, LABELS.tolist(), WORDS)  # 8 × 8, and the recipe resizes to 12
    recipe = tmp_path / "mine.toml"
    recipe.write_text('extends = "natural"\n[data]\nresize = 12\ncrop = 10\n')
    run = ah.fit(None, data, str(recipe), tmp_path / "run", overrides=SHORT, device="cpu")
    record = run.path / "run.json"
    record.write_text(record.read_text().replace('"status": "done"', '"status": "training"'))
    assert ah.resume(run.path, data=data, device="cpu").read_json()["status"] == "done"
    found = ah.audit(ah.load(run.path), data, **AUDIT)
    assert found.data["classes"] == 2 and found.data["query"]["resize"] == 12 and not found.notes
