"""Which classes of data in memory are left out of an audit: by fingerprints, by names, and where it cannot be known."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import anchorhold as ah
from anchorhold.auditing.classes import part_of
from anchorhold.auditing.in_memory import UNKNOWN
from anchorhold.auditing.verifying import verify
from anchorhold.data.adapters import Given, dataset_from, split_from
from anchorhold.data.trained import TrainedOn

WORDS = ("ant", "bee", "cat", "dog", "emu", "fox")
LABELS = torch.arange(6).repeat_interleave(8)
NAMES = [WORDS[label] for label in LABELS.tolist()]


def pictures(seed: int = 0) -> Tensor:
    """Stripes of another width for each class, with noise."""
    noise = torch.rand(len(LABELS), 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    stripes = (torch.arange(8) // (LABELS[:, None] % 3 + 1) % 2)[:, None, None, :] * (
        1 + LABELS[:, None, None, None] // 3
    )
    return (stripes / 4 + noise / 3).clamp(0, 1)


def trained_on(data: Any, held_out: int = 0) -> ah.Embedder:
    """A model with the record of a training on these data."""
    model = ah.Embedder("small", 4, channels=1, size=8)
    model.trained_on = TrainedOn.of(dataset_from(data, held_out=held_out))
    return model


def classes_of(part: Any) -> set[str]:
    split = part.data.split if isinstance(part.data, Given) else split_from(part.data)
    return {split.classes[label] for label in torch.unique(split.labels).tolist()}


@pytest.mark.parametrize("labels", [LABELS, LABELS + 40, NAMES])
@pytest.mark.parametrize("held_out", [0, 2])
def test_of_the_same_data_the_held_out_classes_are_attacked(labels: Any, held_out: int) -> None:
    data = (pictures(), labels)
    part = part_of(data, [trained_on(data, held_out)])
    tested = dataset_from(data).holding_out(held_out).test
    assert classes_of(part) == {tested.classes[label] for label in torch.unique(tested.labels).tolist()}
    assert part.data.split.fingerprint() == tested.fingerprint() and not part.notes
    every = part_of(data, [trained_on(data, held_out)], "all")
    assert len(classes_of(every)) == 6


def test_a_part_of_the_training_is_recognised() -> None:
    data = dataset_from((pictures(), NAMES))
    model = trained_on((pictures(), NAMES))

    def given(split: ah.Split) -> tuple[Tensor, list[str]]:
        assert split.images is not None
        return split.images.permute(0, 3, 1, 2), [split.classes[label] for label in split.labels.tolist()]

    tested, seen = part_of(given(data.test), [model]), part_of(given(data.train), [model])
    assert not tested.notes and "training tested the model" in tested.said
    assert len(seen.notes) == 1 and "was trained on the images attacked here" in seen.notes[0]
    assert part_of(data.train, [model]).notes == seen.notes  # a split too


def test_of_other_images_names_tell_and_numbers_do_not() -> None:
    model = trained_on((pictures(), NAMES))
    trained = dataset_from((pictures(), NAMES)).train
    seen = {trained.classes[label] for label in torch.unique(trained.labels).tolist()}
    others = (pictures(1), NAMES)
    part = part_of(others, [model])
    assert classes_of(part) == set(WORDS) - seen and "by their names" in part.said and not part.notes
    assert classes_of(part_of(others, [model], "all")) == set(WORDS)
    fresh = part_of((pictures(1), [f"new {name}" for name in NAMES]), [model])
    assert len(classes_of(fresh)) == 6 and not fresh.notes
    numbered = part_of((pictures(1), LABELS), [model])
    assert len(classes_of(numbered)) == 6 and numbered.notes == (UNKNOWN,)
    old = trained_on((pictures(), NAMES))
    assert old.trained_on is not None
    old.trained_on = TrainedOn(old.trained_on.name, old.trained_on.train, old.trained_on.test)  # of an older version
    assert part_of(others, [old]).notes == (UNKNOWN,)


def test_where_one_class_would_be_left_none_is_left_out_and_it_is_said() -> None:
    model = trained_on((pictures(), NAMES))
    trained = dataset_from((pictures(), NAMES)).train
    seen = {trained.classes[label] for label in torch.unique(trained.labels).tolist()}
    few = torch.tensor([name in seen or name == min(set(WORDS) - seen) for name in NAMES])
    part = part_of((pictures(1)[few], [name for name, kept in zip(NAMES, few) if kept]), [model])
    assert len(classes_of(part)) == 5 and "4 of the 5 classes" in part.notes[0]


def test_a_model_without_a_record_attacks_what_it_is_given() -> None:
    data = (pictures(), NAMES)
    part = part_of(data, [ah.Embedder("small", 4, channels=1, size=8)])
    assert part.data is data and not part.notes


def test_a_stream_is_read_once() -> None:
    items = list(zip(pictures(), NAMES))
    model = trained_on(items)
    part = part_of(iter(items), [model])
    assert len(classes_of(part)) == 2 and not part.notes


def test_the_record_holds_no_names_and_survives_a_file(tmp_path: Path) -> None:
    model = trained_on((pictures(), NAMES))
    model.save(tmp_path / "m.safetensors")
    again = ah.load(tmp_path / "m.safetensors")
    assert again.trained_on == model.trained_on and model.trained_on is not None
    assert len(model.trained_on.classes) == 4 and not set(model.trained_on.classes) & set(WORDS)
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        told = " ".join(file.metadata().values())
    assert model.trained_on.train in told and not any(f'"{word}"' in told for word in WORDS)
    digits = TrainedOn.of(ah.dataset("digits"))  # a name says enough, and older versions read the record
    assert digits.classes == () and "classes" not in digits.record()


@pytest.mark.medium
def test_receipts_of_the_attacked_part_are_verified_with_the_whole(tmp_path: Path) -> None:
    data = (pictures(), NAMES)
    model = trained_on(data)
    options: dict[str, Any] = {"limit": 4, "steps": 2, "attacks": ["nearest"], "resamples": 5, "examine": None}
    found = ah.audit(model, data, strength="strong", out=tmp_path, device="cpu", **options)
    assert found.data["classes"] == 2
    assert not verify(tmp_path, model, data, device="cpu").problems
    other = (pictures(1), NAMES)
    assert any("other data" in problem for problem in verify(tmp_path, model, other, device="cpu").problems)
