"""fit and audit take data in any form, and all forms of the same images are the same."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset
from torch.utils.data import Dataset as TorchDataset

import anchorhold as ah
from anchorhold.data.adapters import dataset_from, split_from
from anchorhold.errors import DataError

DIGITS = ah.dataset("digits")
IMAGES = torch.cat([DIGITS.train.images, DIGITS.test.images])[::6].permute(0, 3, 1, 2)  # type: ignore[list-item]
LABELS = torch.cat([DIGITS.train.labels, DIGITS.test.labels])[::6]
NAMES = [f"digit {label}" for label in LABELS.tolist()]
SHORT: dict[str, Any] = {"train": {"epochs": 1, "collapse_warmup": 9}, "batch": {"pairs": 8, "mining_pairs": 0}}
SHORT["model"] = {"backbone": "small", "dim": 16, "weights": ""}


class Items(TorchDataset[Any]):
    def __init__(self, named: bool = False) -> None:
        self.named = named

    def __len__(self) -> int:
        return len(IMAGES)

    def __getitem__(self, place: int) -> tuple[Tensor, Any]:
        return IMAGES[place], NAMES[place] if self.named else LABELS[place]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from zip(IMAGES, LABELS)


class Hub:
    """What Hugging Face's `datasets` looks like from outside."""

    column_names = ("img", "fine_label")

    class _Names:
        names = tuple(f"digit {label}" for label in range(10))

    features = {"img": None, "fine_label": _Names()}  # noqa: RUF012

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for image, label in zip(IMAGES, LABELS):
            yield {"img": Image.fromarray(image[0].numpy()), "fine_label": int(label)}


@pytest.mark.parametrize(
    "data",
    [
        (IMAGES, LABELS),
        (IMAGES.numpy(), LABELS.numpy()),
        [IMAGES.permute(0, 2, 3, 1), LABELS.tolist()],
        TensorDataset(IMAGES, LABELS),
        Items(),
        DataLoader(Items(), batch_size=7, shuffle=True),
        DataLoader(Stream(), batch_size=7),
    ],
)
def test_all_forms_of_the_same_images_are_the_same(data: Any) -> None:
    assert split_from(data).fingerprint() == split_from((IMAGES, LABELS)).fingerprint()


@pytest.mark.parametrize("data", [(IMAGES, NAMES), (IMAGES, np.array(NAMES)), Items(named=True)])
def test_names_are_labels(data: Any) -> None:
    split = split_from(data)
    assert split.classes == tuple(sorted(set(NAMES)))
    assert [split.classes[label] for label in split.labels.tolist()] == NAMES


def test_a_split_of_the_hub_keeps_its_names() -> None:
    split = split_from(Hub())
    assert [split.classes[label] for label in split.labels.tolist()] == NAMES
    assert split.images is not None and split.images.shape[1:] == (8, 8, 1)  # grey stays grey


def test_pictures_of_several_sizes_become_squares() -> None:
    pictures = [(Image.new("RGB", (10 + place, 20)), place % 4) for place in range(8)]
    assert split_from(pictures, resize=12).images.shape == (8, 12, 12, 3)  # type: ignore[union-attr]
    assert split_from(pictures).images.shape == (8, 256, 256, 3)  # type: ignore[union-attr]
    assert dataset_from(pictures, resize=12).name == "pictures"


@pytest.mark.parametrize("form", ["tensors", "dataset", "parts"])
def test_fit_and_audit_take_the_same(form: str, tmp_path: Path) -> None:
    half = LABELS < 5
    data: Any = {
        "tensors": (IMAGES, LABELS),
        "dataset": Items(named=True),
        "parts": {"train": (IMAGES[half], LABELS[half]), "test": (IMAGES[~half], LABELS[~half])},
    }[form]
    run = ah.fit(None, data, "natural", tmp_path / "run", overrides=SHORT, device="cpu")
    info = run.read_json()
    assert info["status"] == "done" and info["settings"]["data"]["resize"] == 0  # as they are
    asked = data["test"] if form == "parts" else data
    found = ah.audit(ah.load(run.path), asked, limit=5, steps=1, attacks=["ES"], resamples=5, examine=None)
    assert found.clean["R@1"].value > 30
    assert found.data["classes"] == {"tensors": 2, "dataset": 2, "parts": 5}[form] and not found.notes


def test_a_fifth_of_the_classes_is_tested_on() -> None:
    data = dataset_from((IMAGES, LABELS))
    train, test = (set(split.labels.tolist()) for split in (data.train, data.test))
    assert len(train) == 8 and len(test) == 2 and not train & test
    assert dataset_from((IMAGES, LABELS)).test.fingerprint() == data.test.fingerprint()
    other = dataset_from((IMAGES, LABELS), seed=3)
    assert other.test.fingerprint() != data.test.fingerprint()


def test_parts_share_their_classes() -> None:
    data = dataset_from({"train": (IMAGES[:40], NAMES[:40]), "test": (IMAGES[40:90], NAMES[40:90])})
    for split, names in ((data.train, NAMES[:40]), (data.test, NAMES[40:90])):
        assert [split.classes[label] for label in split.labels.tolist()] == names


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (7, "cannot read images from int"),
        ({"train": (IMAGES, LABELS)}, "needs train and test"),
        ((IMAGES, LABELS[:3]), "one label for each"),
        ((IMAGES.int(), LABELS), "give floats"),
        ([(IMAGES[0], 1), (IMAGES[0, :, :4], 2)] * 4, "differ in shape"),
        ([IMAGES[0]] * 5, r"has to be \(image, label\)"),
        ((IMAGES[LABELS < 3], LABELS[LABELS < 3]), "it takes four"),
        (iter(()), "no images"),
    ],
)
def test_what_is_no_data_is_one_line(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        dataset_from(data)


def test_a_sampler_of_a_loader_is_followed() -> None:
    some = DataLoader(Items(), batch_size=5, sampler=SubsetRandomSampler(range(20)))
    assert len(split_from(some)) == 20
    named = DataLoader(Items(), batch_size=5, collate_fn=lambda items: ([i[0] for i in items], ["x"] * len(items)))
    assert split_from(named).classes == ("x",)


def test_classes_of_one_name_stay_apart() -> None:
    class Named(Items):
        classes = ("a", "crane", "crane", "d", "e", "f", "g", "h", "i", "j")

    assert split_from(Named()).classes[:4] == ("a", "crane (1)", "crane (2)", "d")


def test_pictures_are_audited_as_they_were_trained_on(tmp_path: Path) -> None:
    pictures = [(Image.new("RGB", (9 + place % 3, 12), (20 * (place % 4), 5, 9)), place % 8) for place in range(40)]
    overrides = SHORT | {"data": {"resize": 10, "crop": 8}}
    ah.fit(None, pictures, "natural", tmp_path / "run", overrides=overrides, device="cpu")
    found = ah.audit(ah.load(tmp_path / "run"), pictures, limit=5, steps=1, attacks=["ES"], examine=None, resamples=5)
    assert (found.data["query"]["resize"], found.data["query"]["crop"]) == (10, 8)


@pytest.mark.parametrize("labels", [[None] * len(IMAGES), [b"a"] * len(IMAGES), ["a", 1] * (len(IMAGES) // 2)])
def test_labels_of_other_kinds_are_one_line(labels: list[Any]) -> None:
    with pytest.raises(DataError):
        split_from((IMAGES[: len(labels)], labels))
