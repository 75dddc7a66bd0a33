"""Starts that fail, and starts beside another: what a folder lets a second command do."""

import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import anchorhold as ah
from anchorhold.console import Silent
from anchorhold.errors import RunError
from anchorhold.training.fit import resume
from anchorhold.training.sweeping import sweep
from tests.children import spawned

pytestmark = pytest.mark.medium

SMALL = {
    "model": {"backbone": "small", "dim": 8, "weights": "", "freeze_batchnorm": False},
    "batch": {"pairs": 16, "mining_pairs": 0},
    "train": {"epochs": 1, "precision": "fp32"},
}


@pytest.fixture(scope="module")
def digits() -> ah.Dataset:
    return ah.dataset("digits")


class Lines(Silent):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def pauses(folder: Path, mark: Path) -> None:
    """A training that stays in its first step."""

    def pause(*_: object) -> None:
        mark.touch()
        signal.pause()

    torch.set_num_threads(1)
    with mock.patch("torch.optim.Adam.step", pause):
        ah.fit(None, ah.dataset("digits"), "natural", folder, overrides=SMALL, device="cpu")


def test_resume_beside_a_training_is_refused_and_the_training_goes_on(digits: ah.Dataset, tmp_path: Path) -> None:
    mark = tmp_path / "in-its-first-step"
    with (
        spawned(pauses, tmp_path / "run", mark, until=mark) as child,
        pytest.raises(RunError, match=f"in use by process {child}"),
    ):
        resume(tmp_path / "run", data=digits, device="cpu")
    resume(tmp_path / "run", data=digits, device="cpu")
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_a_start_that_failed_after_its_first_checkpoint_is_replaced(digits: ah.Dataset, tmp_path: Path) -> None:
    report = Lines()
    options: dict[str, Any] = {"overrides": SMALL, "device": "cpu"}
    with (
        mock.patch("torch.optim.Adam.step", side_effect=torch.OutOfMemoryError("no room")),
        pytest.raises(torch.OutOfMemoryError),
    ):
        ah.fit(None, digits, "natural", tmp_path, **options)
    assert (tmp_path / "last.safetensors").exists()
    ah.fit(None, digits, "natural", tmp_path, report=report, **options)
    assert any("without a finished step" in line for line in report.said)
    with pytest.raises(RunError, match="already holds a run"):  # this one has something to lose
        ah.fit(None, digits, "natural", tmp_path, **options)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "previous.safetensors").unlink()
    with pytest.raises(RunError, match="already holds a run"):
        ah.fit(None, digits, "natural", tmp_path, **options)


def test_a_sweep_whose_start_failed_may_be_corrected(digits: ah.Dataset, tmp_path: Path) -> None:
    vary, options = {"train.seed": ["1"]}, {"device": "cpu"}
    with mock.patch("torch.optim.Adam.step", side_effect=MemoryError), pytest.raises(MemoryError):
        sweep(digits, "natural", vary, tmp_path, overrides=SMALL, **options)
    corrected = {**SMALL, "batch": {"pairs": 8, "mining_pairs": 0}}
    assert len(sweep(digits, "natural", vary, tmp_path, overrides=corrected, **options).tables[0].rows) == 1
    with pytest.raises(RunError, match="other settings"):
        sweep(digits, "natural", vary, tmp_path, overrides=SMALL, **options)
