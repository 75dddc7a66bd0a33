"""Test images of another size than training crops: what is trained on, evaluated, recorded and audited."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorhold as ah
from anchorhold.data.settings import DataSettings
from anchorhold.defences.menu import DEFENCES
from anchorhold.errors import SettingsError
from anchorhold.report.collect import read_run
from anchorhold.reproduce.comparison import departures
from anchorhold.reproduce.rows import row_named

pytestmark = pytest.mark.medium

CHANGES: dict[str, Any] = {
    "data": {"crop": 6, "test_crop": 8},
    "train": {"epochs": 2, "evaluate_every": 2, "collapse_warmup": 9},
    "model": {"backbone": "test_resnet", "dim": 8, "weights": ""},
    "batch": {"pairs": 32},
}


@pytest.fixture(scope="module")
def digits() -> ah.Dataset:
    whole = ah.dataset("digits")
    return replace(
        whole,
        train=whole.train.keep(torch.arange(len(whole.train)) < 150),
        test=whole.test.keep(torch.arange(len(whole.test)) < 90),
    )


def recall(e: Tensor, labels: Tensor) -> float:
    """R@1 by a plain loop."""
    right = 0
    for i in range(len(e)):
        others = [j for j in range(len(e)) if j != i]
        nearest = min(others, key=lambda j: (e[i] - e[j]).square().sum().item())
        right += int(labels[nearest] == labels[i])
    return 100 * right / len(e)


def test_training_crops_and_tests_on_more(digits: ah.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    natural, seen = DEFENCES["natural"], set()

    def noting(step: Any, settings: Any) -> Any:
        seen.add(tuple(step.batch.images.shape[2:]))
        yield from natural(step, settings)

    monkeypatch.setitem(DEFENCES, "natural", noting)
    run = ah.fit(None, digits, "natural", tmp_path / "run", overrides=CHANGES, device="cpu")
    assert seen == {(6, 6)}
    model = ah.load(run.path)
    assert digits.test.images is not None
    whole = digits.test.images.permute(0, 3, 1, 2).float() / 255
    with torch.no_grad():
        found = {side: recall(model(x), digits.test.labels) for side, x in ((8, whole), (6, whole[..., 1:7, 1:7]))}
    assert run.read_json()["final"]["r1"] == pytest.approx(found[8]) and found[8] != pytest.approx(found[6])
    # The model takes the larger side with it: an audit of the same data prepares images so.
    assert (model.config["preprocessing"]["crop"], model.preprocess.in_memory) == (8, (0, 8))
    audit = ah.audit(model, digits, protocols=("corrected",), attacks=["ES"], limit=4, steps=1, device="cpu")
    assert audit.clean["R@1"].value == pytest.approx(found[8])


def test_a_model_of_one_size_refuses_before_training(digits: ah.Dataset, tmp_path: Path) -> None:
    changes = {**CHANGES, "data": {"crop": 4, "test_crop": 8}, "model": {"backbone": "mlp", "dim": 2, "weights": ""}}
    with pytest.raises(SettingsError, match=r"takes no images of 8×8 .*leave out data\.test_crop"):
        ah.fit(None, digits, "natural", tmp_path / "run", overrides=changes, device="cpu")


def test_settings() -> None:
    assert DataSettings(crop=224).at_test == DataSettings(crop=224)
    assert DataSettings(crop=224, test_crop=256).at_test == DataSettings(crop=256)
    with pytest.raises(SettingsError, match=r"data\.test_crop = 300 is larger than data\.resize = 256"):
        DataSettings(test_crop=300)


def test_a_row_at_another_size_is_no_reproduction(digits: ah.Dataset, tmp_path: Path) -> None:
    more = {**CHANGES, "train": {**CHANGES["train"], "mean_from": 0.5}}
    run = ah.fit(None, digits, "natural", tmp_path / "run", overrides=more, device="cpu")
    entry = read_run(run.path)
    said = " ".join(departures(entry, row_named("hm/t6/cub/natural-r")))
    assert "data.test_crop" in said and "train.mean_from" in said
