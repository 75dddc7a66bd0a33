"""When a training is judged to have collapsed."""

from pathlib import Path

import pytest

from anchorhold.config.recipes import settings_from
from anchorhold.config.settings import Settings
from anchorhold.console import Silent
from anchorhold.errors import RunError
from anchorhold.runs.folder import Run
from anchorhold.training.checkpoint import Progress
from anchorhold.training.safety import judge_collapse, judge_features

FLAT = {"separability": 0.0, "mean_distance": 1.0}
ROUND = {"separability": 0.5, "mean_distance": 1.0}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "run", {"status": "training"})


def after(warmup: int, on_collapse: str = "stop") -> Settings:
    return settings_from("hm-lga", {"train": {"collapse_warmup": warmup, "on_collapse": on_collapse}})


def judge(run: Run, settings: Settings, at: Progress, *rows: dict[str, float]) -> None:
    """One epoch a row."""
    for row in rows:
        at.epoch += 1
        judge_collapse(run, settings, at, row, Silent())


def test_one_flat_epoch_is_no_collapse_and_two_running_are(run: Run) -> None:
    settings, at = after(0), Progress()
    judge(run, settings, at, FLAT, ROUND, FLAT)
    assert run.read_json()["status"] == "training" and at.collapsed == 1
    with pytest.raises(
        RunError, match=r"by epoch 4: separability of .* 0.0000, under train.collapse_separability = 0.02"
    ):
        judge(run, settings, at, FLAT)
    assert run.read_json()["status"] == "stopped"


def test_epochs_of_the_warmup_do_not_count(run: Run) -> None:
    settings, at = after(3), Progress()
    judge(run, settings, at, FLAT, FLAT, FLAT)
    assert at.collapsed == 0
    judge(run, settings, at, FLAT)
    with pytest.raises(RunError, match="the model collapsed by epoch 5"):
        judge(run, settings, at, FLAT)


def test_embeddings_on_one_point_are_flat_however_well_they_separate(run: Run) -> None:
    # A training of ours went on to its end with a mean distance of 0.015, its loss at the margin.
    point, apart = ({"separability": 0.5, "mean_distance": distance} for distance in (0.049, 0.051))
    judge(run, after(0), Progress(), apart, apart)
    with pytest.raises(
        RunError, match=r"by epoch 2: mean distance of clean pairs 0\.0490, under train\.collapse_distance = 0\.05;"
    ):
        judge(run, after(0), Progress(), point, point)


def test_features_are_lost_below_half_of_what_they_found_before(run: Run) -> None:
    said: list[str] = []
    report = Silent()
    report.say = said.append  # type: ignore[method-assign]
    for start, now in ((None, 1.0), (0.0, 0.0), (100.0, 50.0), (100.0, None)):
        judge_features(run, start, {"epoch": 1, "features_r1": now} if now is not None else {"epoch": 1}, report)
    assert not said and "flags" not in run.read_json()
    for epoch in (2, 3):
        judge_features(run, 100.0, {"epoch": epoch, "features_r1": 49.9}, report)
    (flag,) = run.read_json()["flags"]
    assert len(said) == 1 and said[0] == f"warning: {flag['text']}" and "fell from 100.0 to 49.9" in said[0]
    assert (flag["name"], flag["epoch"], flag["value"]) == ("features", 2, 49.9)


def test_a_collapse_that_is_gone_on_with_is_said_once(run: Run) -> None:
    said: list[str] = []
    report = Silent()
    report.say = said.append  # type: ignore[method-assign]
    at = Progress()
    for at.epoch in (1, 2, 3, 4):
        judge_collapse(run, after(0, "warn"), at, FLAT, report)
    assert len(said) == 1 and "by epoch 2" in said[0] and run.read_json()["status"] == "training"


def test_few_images_are_no_evidence_of_a_collapse(run: Run) -> None:
    """A small folder: the value is below its threshold, and so far from certain that nothing follows from it."""
    at = Progress()
    judge(run, after(0), at, *[{**FLAT, "separability_high": 0.3, "mean_distance_high": 0.9}] * 6)
    judge(run, after(0), at, *[{**FLAT, "separability_high": 0.01, "beyond_chance": 0.4}] * 2)
    assert at.collapsed == 0 and run.read_json()["status"] == "training"
    with pytest.raises(RunError, match=r"separability of .* 0\.0100, under"):
        judge(run, after(0), at, *[{**FLAT, "separability_high": 0.01}] * 2)
